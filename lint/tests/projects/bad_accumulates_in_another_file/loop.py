def one_epoch(accelerator, model, optimizer, loader):
    for batch in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()  # expect: AMP113
            accelerator.backward(model(**batch).loss)
            optimizer.step()
