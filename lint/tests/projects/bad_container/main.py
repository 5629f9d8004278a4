import yaml
from networks import load
from optimizers import build
from trainer import Trainer

model = load()
optimizer = build({name: model for name in yaml.safe_load("names")})
trainer = Trainer(model, optimizer, load("data"))
for _ in range(9):
    trainer.train_epoch()
