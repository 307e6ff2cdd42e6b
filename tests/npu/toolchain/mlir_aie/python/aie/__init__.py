"""A stand-in for mlir-aie, of which `unicorn npu build-kernels` asks where it is."""
