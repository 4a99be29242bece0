"""The examples run on the CPU, and their losses fall."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.append(str(EXAMPLES))


def test_plain_loop():
    import plain_loop

    losses = plain_loop.main(steps=3)
    assert losses[-1] < losses[0]


def test_trainer_saves_a_model_that_transformers_loads(tmp_path):
    import trainer
    import transformers

    trainer.main(str(tmp_path), steps=2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "LlamaForCausalLM"


def test_lora():
    import lora

    losses = lora.main(steps=3)
    assert losses[-1] < losses[0]
