def create(name, parts):
    if name == "plain":
        from plain import Plain

        return Plain(*parts)
    if name == "gan":
        from gan import Gan

        return Gan(*parts)
    raise ValueError(name)
