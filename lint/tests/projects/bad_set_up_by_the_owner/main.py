from trainer import Trainer

def main(opt, net, loader):
    t = Trainer(opt)
    t.set_model(net)
    t.set_loader(loader)
    t.fit()
