"""The tiny model on a real engine: output worth comparing, and comparable.

Random weights at the usual scale repeat one token; a test of identity then passes whatever happens.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

PROMPTS = [
    "Hello", "The capital of France is", "Once upon a time", "a", "1 2 3 4 5", "Zürich", "?",
    "def main():\n    return", "Write a poem about the sea.", "the the the the the the the the",
    "Explain how a leader is elected", "東京", "Count to ten: one two three", "stream number 7",
    "stream number 8", "a long sentence that says the same again and again " * 12,
]  # fmt: skip

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
model, prompts = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(model, enforce_eager=True, kv_cache_memory_bytes=64 << 20, block_size=32,
          max_model_len=2048, max_num_seqs=32, enable_prefix_caching=False)
def greedy(prompts, tokens):
    parameters = SamplingParams(temperature=0, max_tokens=tokens)
    return [(list(o.prompt_token_ids), list(o.outputs[0].token_ids), o.outputs[0].finish_reason,
             o.outputs[0].text) for o in llm.generate(prompts, parameters, use_tqdm=False)]
whole = greedy(prompts, 200)
alone = greedy(prompts[:1], 200)
resumed = greedy([TokensPrompt(prompt_token_ids=p + ids[:77]) for p, ids, _, _ in whole], 123)
changed = greedy([TokensPrompt(prompt_token_ids=[(p[0] + 1000) % 3000, *p[1:], *ids[:100]])
                  for p, ids, _, _ in whole], 100)
print("RESULT" + json.dumps(
    {"whole": whole, "alone": alone, "resumed": resumed, "changed": changed}))
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    model = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run(
        [sys.executable, CHECKOUT / "deploy/dev/make_model.py", "--out", model],
        check=True,
        timeout=60,
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), json.dumps(PROMPTS)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_PLUGINS": "",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=110,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT"))


pytestmark = pytest.mark.full


def test_greedy_outputs_are_diverse(result):
    distinct = [len(set(ids[:100])) for _, ids, _, _ in result["whole"]]
    assert len(distinct) == 16
    assert min(distinct) >= 40, distinct
    firsts = {tuple(ids[:20]) for _, ids, _, _ in result["whole"]}
    assert len(firsts) == len(PROMPTS), "two prompts give the same text"


def test_greedy_outputs_do_not_end_early(result):
    assert {reason for _, _, reason, _ in result["whole"]} == {"length"}
    assert {len(ids) for _, ids, _, _ in result["whole"]} == {200}


def test_outputs_are_readable_text(result):
    for _, _, _, text in result["whole"]:
        assert "\ufffd" not in text
        assert text.replace("\n", "").isprintable()


def test_continuing_from_the_middle_gives_the_same_tokens(result):
    for (_, whole, _, _), (_, tail, _, _) in zip(result["whole"], result["resumed"], strict=True):
        assert whole[77:] == tail


def test_company_in_the_batch_changes_nothing(result):
    assert result["alone"][0] == result["whole"][0]


def test_every_output_depends_on_the_far_context(result):
    """One changed token at the very start, 100 tokens back or more, must show."""
    for (_, whole, _, _), (_, other, _, _) in zip(result["whole"], result["changed"], strict=True):
        assert whole[100:] != other
