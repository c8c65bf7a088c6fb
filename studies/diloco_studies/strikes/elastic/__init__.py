"""The data-parallel baseline under the same strikes (`--method data-parallel`)."""
