import lightning


class Plain(lightning.LightningModule):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def training_step(self, batch, batch_idx):
        return self.network(batch).mean()
