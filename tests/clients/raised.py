"""Returns the exception of an SDK call."""


def raised(kind, call):
    try:
        call()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} instead of {kind.__name__}: {error}") from error
    raise AssertionError(f"no {kind.__name__}")
