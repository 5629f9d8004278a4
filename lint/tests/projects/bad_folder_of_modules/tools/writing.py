"""Says by itself when it is time to write."""


class Writer:
    def __init__(self, step, every):
        self.step = step
        self.is_time = step % every == 0
