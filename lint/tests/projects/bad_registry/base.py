from registry import OPTIMIZERS, SCHEDULES


class Base:
    def __init__(self, model, config):
        self.model = model
        self.optimizer = OPTIMIZERS.build(config["optimizer"], params=model.parameters())
        self.lr_scheduler = SCHEDULES.build(config["schedule"], optimizer=self.optimizer)
