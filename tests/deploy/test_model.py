"""The local model is the same everywhere, and what its makers promise of it holds."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors.numpy")
tokenizers = pytest.importorskip("tokenizers")

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / "deploy/dev/make_model.py"

# Of `--size tiny --seed 1` in FORMAT 1. Change it only together with FORMAT: recorded runs and
# figures name the model by this digest.
TINY_DIGEST = "e94949ebdbfb1b6816ba4523d0bea831c411580ca107553d5303b746030e49c3"


def load_script(name: str):
    specification = importlib.util.spec_from_file_location(name, CHECKOUT / f"deploy/dev/{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


make_model = load_script("make_model")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    assert make_model.main(["--out", str(directory)]) == 0
    return directory


def test_is_the_same_on_every_machine(tiny):
    manifest = json.loads((tiny / make_model.MANIFEST).read_text())
    assert manifest["digest"] == TINY_DIGEST


def test_is_the_same_under_other_hash_seeds(tiny, tmp_path):
    for seed in ("0", "12345"):
        out = tmp_path / seed
        subprocess.run(
            [sys.executable, SCRIPT, "--out", out],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            timeout=60,
        )
        assert make_model.file_digests(out) == make_model.file_digests(tiny)


def test_does_nothing_when_present(tiny, capsys):
    before = {path: path.stat().st_mtime_ns for path in tiny.iterdir()}
    assert make_model.main(["--out", str(tiny)]) == 0
    assert "present" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tiny.iterdir()} == before


def test_makes_a_damaged_or_different_one_again(tmp_path):
    out = tmp_path / "draft"
    digest, made = make_model.ensure_model(out, "draft", 1)
    assert made
    weights = out / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert make_model.ensure_model(out, "draft", 1) == (digest, True)
    other, made = make_model.ensure_model(out, "draft", 2)
    assert made and other != digest


def test_leaves_a_directory_of_something_else_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(SystemExit):
        make_model.main(["--out", str(tmp_path)])
    assert (tmp_path / "thesis.txt").read_text() == "irreplaceable"


def test_every_size_shares_the_tokenizer(tiny, tmp_path):
    for size in make_model.SHAPES:
        make_model.ensure_model(tmp_path / size, size, 1)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / size / name).read_bytes() == (tiny / name).read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        " the  quick\tbrown\nfox\r\n",
        "Zürich 東京 🙂 \x00\x7f",
        "couldn't",
        "a" * 500,
    ],
)
def test_tokenizer_keeps_every_byte(tiny, text):
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_common_words_are_one_token(tiny):
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == make_model.VOCABULARY_SIZE
    assert len(tokenizer.encode(" the capital of the world").ids) < 12


def test_greedy_decoding_cannot_end_by_itself(tiny):
    weights = safetensors.load_file(tiny / "model.safetensors")
    head = weights["lm_head.weight"]
    ends = json.loads((tiny / "generation_config.json").read_text())["eos_token_id"]
    assert not head[ends].any()
    # The largest of thousands of logits is above 0, the logit of a zero row: shown for states of
    # every direction, since the head's other rows surround the origin.
    states = np.random.RandomState(7).standard_normal((2000, head.shape[1])).astype(np.float32)
    assert (states @ head.T).max(axis=1).min() > 1.0


def test_silent_tokens_are_those_that_read_badly():
    assert make_model.reads_well(b" the") and make_model.reads_well("é".encode())
    assert not make_model.reads_well(b"\xc3") and not make_model.reads_well(b"\x00")


def test_sampling_defaults_of_clients_are_not_changed(tiny):
    generation = json.loads((tiny / "generation_config.json").read_text())
    assert set(generation) == {"eos_token_id", "pad_token_id"}


def test_seed_out_of_range_is_refused(tmp_path):
    with pytest.raises(SystemExit):
        make_model.main(["--out", str(tmp_path / "m"), "--seed", "-1"])
