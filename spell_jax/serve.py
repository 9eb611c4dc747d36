"""Serves a policy over HTTP, in OpenAI's protocol.

    python -m spell_jax.serve --policy=FOLDER [--adapters=FOLDER] [--port=8000] [--host=127.0.0.1]

1. GET /v1/models; POST /v1/chat/completions and /v1/completions, whole or as a stream; GET /health
   and /metrics (Prometheus). Items 6 and 7 have the fields of a request.
2. A request joins the running ones at once. A document that many prompts begin with is read once,
   and stays in the KV cache until other prompts need its pages.
3. A seed gives the same answer whatever else is served, and the answer of spell_jax.generate:
   prompt i of a request has the key of line i.
4. Other machines can reach the server only if --host says so, and then need the key in the
   environment variable that --api_key names. Prompts, answers and keys are not logged.
5. SIGTERM and Ctrl-C end the server: no new requests, --grace_s seconds for the running ones.
6. Fields of a chat: model, messages (contents are texts, or lists of {"type": "text"} parts), n,
   temperature, top_p, top_k, min_p, max_tokens or max_completion_tokens, stop (up to 16 texts),
   stop_token_ids, seed, logprobs, top_logprobs (up to 20), stream, stream_options. A completion has
   prompt (a text, token ids, or a list of these; the text of a special token is that token),
   logprobs (a number), echo and best_of = n instead; max_tokens = 0 with echo scores the prompt.
7. Logprobs are of the full vocabulary at the sampling temperature (at temperature 0: at 1). They
   and the counts of tokens include the stop token. Alternatives and echo need a whole reply, not a
   stream. Fields without effect here must have the value that changes nothing (tools: [],
   frequency_penalty: 0); labels such as user are accepted; any other field is refused by name.

Needs the extra "serve" (Starlette, uvicorn, prometheus_client).
"""

from __future__ import annotations

from absl import flags

from spell_jax.policy.choices import DTYPES, THINKING
from spell_jax.runtime import entry


def main(_) -> None:
    # Imported here, so that --help and a mistake in a flag are answered at once.
    from spell_jax.runtime import setup
    from spell_jax.serving import server

    setup.setup()
    server.serve(flags.FLAGS)


if __name__ == "__main__":
    # Defined here, so that one process may import several entry points.
    flags.DEFINE_string("policy", None, "Folder of the policy.", required=True)
    flags.DEFINE_string("adapters", None, "Folder of LoRA adapters, in PEFT's format.")
    flags.DEFINE_string("name", "", "Name of the model for clients; by default the folder's.")
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; others than this need a key.")
    flags.DEFINE_integer("port", 8000, "Port; 0: a free one.", lower_bound=0, upper_bound=65535)
    flags.DEFINE_string(
        "api_key", "SPELL_SERVE_KEY", "Name of the environment variable that holds the key."
    )
    flags.DEFINE_integer(
        "max_prompt", None, "Longest prompt; by default what --max_tokens leaves.", lower_bound=1
    )
    flags.DEFINE_integer(
        "max_tokens",
        None,
        "Longest answer; by default 4096, at most half of the context.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "max_queued", 256, "Most prompts that wait; then status 429.", lower_bound=1
    )
    flags.DEFINE_integer("max_body_mb", 8, "Largest body of a request in MiB.", lower_bound=1)
    flags.DEFINE_float(
        "grace_s",
        10.0,
        "Seconds for running requests after SIGTERM or Ctrl-C.",
        lower_bound=0.0,
        upper_bound=20.0,  # below sigterm.LIMIT_S
    )
    flags.DEFINE_enum("thinking", "", list(THINKING), "Thinking mode of templates that have one.")
    flags.DEFINE_enum("dtype", "float32", list(DTYPES), "Dtype of the weights.")
    flags.DEFINE_enum("cache_dtype", "compute", ["compute", "int8"], "Dtype of the KV cache.")
    flags.DEFINE_enum("weights_dtype", "compute", ["compute", "int8"], "Dtype of the kernels.")
    flags.DEFINE_integer(
        "kv_cache_tokens",
        65_536,
        "KV cache capacity in tokens per device, besides one prompt and answer.",
        lower_bound=1,
    )
    flags.DEFINE_integer("slots", 64, "Maximum number of answers decoded at once.", lower_bound=1)
    flags.DEFINE_integer(
        "prefill_tokens", 1024, "Maximum number of prompt tokens per prefill call.", lower_bound=1
    )
    entry.run_main(main)
