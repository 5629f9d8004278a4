"""A small BERT that classifies, trained by Hugging Face's Trainer.

Run as a script it trains; `task` is the same for ``ampwise bench``.
"""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

LENGTH, BATCH, ROWS = 64, 8, 512


def make_model():
    config = BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def rows():
    """Sequences of two kinds of tokens, and which kind there is more of."""
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, (ROWS, LENGTH), generator=source)
    labels = ((ids < 500).sum(1) > LENGTH // 2).long()
    mask = torch.ones(LENGTH, dtype=torch.long)
    return [
        {"input_ids": each, "attention_mask": mask, "labels": label}
        for each, label in zip(ids, labels, strict=True)
    ]


def task():
    from ampwise import Task

    return Task(
        model=make_model,
        batches=lambda: torch.utils.data.DataLoader(rows(), BATCH, shuffle=True),
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=args.steps, per_device_train_batch_size=BATCH, learning_rate=1e-4,
            use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=100,
        )  # fmt: skip
        Trainer(model=make_model(), args=settings, train_dataset=rows()).train()


if __name__ == "__main__":
    main()
