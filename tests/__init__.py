"""Package, so that helpers of several tests have one name for pytest and for mypy: `from tests._traces import chain`."""
