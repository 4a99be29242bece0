"""Fine-tuning by transformers' Trainer. Saved files are those of the model without Deepwell.

python trainer.py [FOLDER]
"""

import sys
import tempfile

import torch
from small_llama import sequences, small_llama
from transformers import Trainer, TrainingArguments

import deepwell


def main(folder: str, steps: int = 10) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = deepwell.optimize(small_llama(device), verbose=True, on_cpu=device == "cpu")
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-3,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=device == "cpu",
    )  # fmt: skip
    data = [{"input_ids": ids, "labels": ids} for ids in sequences(4 * steps)]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    result = trainer.train()
    trainer.save_model(folder)
    return result.training_loss


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else scratch)
