def load(config):
    return config["loader"]
