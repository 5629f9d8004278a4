import torch.nn.functional as F


def of_tokens(logits, targets):
    return F.log_softmax(logits, dim=-1).gather(2, targets.unsqueeze(-1)).squeeze(-1)
