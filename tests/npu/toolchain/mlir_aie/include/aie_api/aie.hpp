// A stand-in for aie_api, which nothing compiles: tests/npu/host_aie_api has the one for the host.
