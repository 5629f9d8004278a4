from torch import nn


class Criterion:
    def __init__(self, blank=0):
        self.ctc = nn.CTCLoss(blank=blank, zero_infinity=True)

    def ctc_loss(self, outputs, targets, input_lengths, target_lengths):
        outputs = outputs.float()
        scores = outputs.log_softmax(dim=-1).transpose(0, 1)
        return self.ctc(scores, targets, input_lengths, target_lengths)
