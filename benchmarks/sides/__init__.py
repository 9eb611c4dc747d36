"""Peers' sides of `python -m benchmarks peers`: one GRPO step, played by another library.

    PYTHON -m benchmarks.sides.NAME JSON

1. PYTHON is the interpreter of the peer's own environment, so a side imports the peer, numpy and
   what the peer brings along, nothing of spell_jax. It needs no network: weights are random and
   made in place, prompts are random words, rewards are random numbers.
2. JSON has the options of contract.SideOptions. The last line of the output is JSON too, the fields
   of contract.Numbers. Whatever else the libraries print comes before it.
3. A step samples G answers of S tokens to each prompt, at temperature 1. No token ends an answer.
   Then comes one AdamW step, with the gradient of all answers. The lists of seconds begin with the
   first step, in which programs are compiled.
4. There is one device, no KL term and no recomputation of activations, as far as the peer allows.
   `differences` says where it does not, and what else the peer's step does and ours does not: what
   it pads, repeats or evaluates.
"""
