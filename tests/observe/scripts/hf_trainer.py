"""A small BERT that classifies, from a config, trained by Hugging Face's Trainer."""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertModel, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
parser.add_argument("--fault", choices=["none", "forward", "backward", "skip"], default="none")
parser.add_argument("--at-step", type=int, default=3)
parser.add_argument("--once", action="store_true")
parser.add_argument(
    "--as-shipped", action="store_true", help="fp16=True on a CPU: Trainer ignores it"
)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--optim", default="adamw_torch_fused")
parser.add_argument("--dump")
args = parser.parse_args()
torch.manual_seed(0)
config = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
    attention_probs_dropout_prob=args.dropout,
)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = BertModel(config)
        self.head = nn.Linear(32, 2)
        self.forwards = 0

    def broken(self, how):
        at = (args.at_step - 1) * args.accumulate
        late = self.forwards > at and not (args.once and self.forwards > at + args.accumulate)
        return args.fault == how and late and self.training

    def forward(self, input_ids, attention_mask, labels):
        self.forwards += 1
        hidden = self.bert(input_ids, attention_mask).last_hidden_state
        if self.broken("forward"):
            hidden = torch.exp(hidden.float() + 100)  # PLANTED forward
        pooled = hidden.mean(1)
        if self.broken("backward"):
            apart = pooled - pooled.detach()
            pooled = pooled + apart.pow(2).sum(-1, keepdim=True).sqrt()  # PLANTED backward
        logits = self.head(pooled)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows(count):
    """Sequences of two kinds of tokens, and which kind there is more of."""
    out = []
    for index in range(count):
        source = torch.Generator().manual_seed(index)
        ids = torch.randint(64, (16,), generator=source)
        label = int((ids < 32).sum() > 8)
        out.append({"input_ids": ids, "attention_mask": torch.ones(16).long(), "labels": label})
    return out


class Losses(TrainerCallback):
    def __init__(self):
        self.values = []

    def on_log(self, arguments, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.values.append(logs["loss"])


losses = Losses()
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=Classifier(),
        args=TrainingArguments(
            folder,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=1e-3,
            optim=args.optim,
            warmup_steps=2,
            logging_steps=1,
            logging_nan_inf_filter=False,
            bf16=args.precision == "bf16",
            fp16=args.precision == "fp16",
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rows(128),
        callbacks=[losses],
    )
    if args.precision == "fp16" and not args.as_shipped:
        init_scale = 2.0**30 if args.fault == "skip" else 2.0**12
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale)
        trainer.accelerator.native_amp = True
    trainer.train()
if args.dump:
    torch.save({"losses": losses.values, "model": trainer.model.state_dict()}, args.dump)
