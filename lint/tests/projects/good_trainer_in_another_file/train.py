import lightning
from factory import create


def main(args, parts, loader):
    module = create(args.name, parts)
    trainer = lightning.Trainer(precision="bf16-mixed")
    trainer.fit(module, loader)
