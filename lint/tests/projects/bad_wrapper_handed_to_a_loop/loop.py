import torch


def one_epoch(net, optimizer, loss_scaler, loader, args):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(x, y)
        loss = loss / args.accum_iter
        update = (i + 1) % args.accum_iter == 0
        loss_scaler(loss, optimizer, update_grad=update)  # expect: AMP307
        if update:
            optimizer.zero_grad()
