import lightning
from factory import create


def main(args, parts, loader):
    module = create(args.name, parts)
    trainer = lightning.Trainer(precision=args.precision)
    trainer.fit(module, loader)
