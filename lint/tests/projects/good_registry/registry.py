class Registry:
    def __init__(self):
        self._classes = {}

    def build(self, config, **given):
        arguments = {**config, **given}
        class_ = self._classes[arguments.pop("type")]
        return class_(**arguments)


OPTIMIZERS = Registry()
SCHEDULES = Registry()
