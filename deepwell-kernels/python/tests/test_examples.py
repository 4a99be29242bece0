"""The examples run on the CPU, and their losses fall."""

import json
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


def test_the_notebook(capsys):
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    # The steps learn the batch, in PyTorch and then in the engine, and the weights come back.
    assert names["losses"][-1] < names["losses"][0] and names["in_engine"][-1] < names["losses"][-1]
    assert max(names["errors"].values()) < 1e-3
    assert names["after"] < names["in_engine"][-1]
    assert abs(names["after"] - names["engine"].evaluate(names["ids"])) < 1e-2
    assert "PyTorch sees no GPU" in capsys.readouterr().out or names["has_gpu"]
