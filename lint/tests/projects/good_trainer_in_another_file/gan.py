import lightning
import torch


class Gan(lightning.LightningModule):
    def __init__(self, generator, discriminator):
        super().__init__()
        self.automatic_optimization = False
        self.generator = generator
        self.discriminator = discriminator

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.generator.parameters(), fused=True)
        return first, torch.optim.AdamW(self.discriminator.parameters(), fused=True)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        fake = self.generator(batch)
        first.zero_grad()
        self.manual_backward(-self.discriminator(fake).mean())
        torch.nn.utils.clip_grad_norm_(self.generator.parameters(), 1.0)
        first.step()
        second.zero_grad()
        self.manual_backward(self.discriminator(fake.detach()).mean())
        torch.nn.utils.clip_grad_norm_(self.discriminator.parameters(), 1.0)
        second.step()
