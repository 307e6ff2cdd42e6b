/* The C ABI between Unicorn (src/npu/shim.rs) and XRT, whose own interface for NPUs is only in C++.
 *
 * Two shared objects implement it: `libunicorn_npu.so`, which `make npu-shim` builds from shim.cpp on the machine whose
 * XRT it calls, and the test double (tests/npu/double). The functions are thin on purpose: shim.rs decides which flags,
 * group ids and order a dispatch needs, and the double checks them.
 *
 * Every function that can fail returns a code below, and writes the reason to `error`, as a line that ends with a 0
 * byte. No function throws. Any thread may call them, but only one at a time. */
#ifndef UNICORN_NPU_SHIM_H
#define UNICORN_NPU_SHIM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface. It changes with every change of the interface. */
#define UNICORN_NPU_ABI 2

/* The size of each text in bytes, including the 0 byte. */
#define UNICORN_NPU_TEXT 1024

enum {
    UNICORN_NPU_OK = 0,
    /* XRT refused a call. `error` has XRT's text. */
    UNICORN_NPU_XRT = -1,
    /* The command ended without completing. */
    UNICORN_NPU_COMMAND_STATE = -2,
    /* The command did not end in time. Every later call returns this code too. */
    UNICORN_NPU_TIMEOUT = -3,
    /* The kernel refuses to lock more memory for this process. */
    UNICORN_NPU_MEMLOCK = -4,
    /* Other programs hold the columns. */
    UNICORN_NPU_NO_COLUMNS = -5,
    /* This user has no permission to open the device. */
    UNICORN_NPU_GROUP = -6,
    UNICORN_NPU_NO_DEVICE = -7,
    UNICORN_NPU_BAD_ARGUMENT = -8,
    /* The memory of another device cannot be used in place. */
    UNICORN_NPU_DMA_BUF = -9,
};

/* The kind of a buffer's memory, and the direction of a sync. */
enum { UNICORN_NPU_CACHEABLE = 1, UNICORN_NPU_HOST_ONLY = 2 };
enum { UNICORN_NPU_TO_DEVICE = 0, UNICORN_NPU_FROM_DEVICE = 1 };

typedef struct unicorn_npu_device unicorn_npu_device;
typedef struct unicorn_npu_kernel unicorn_npu_kernel;
typedef struct unicorn_npu_bo unicorn_npu_bo;

/* UNICORN_NPU_ABI of the shared object. Its meaning is the same in all versions. */
uint32_t unicorn_npu_abi(void);

/* 1 for the test double, which computes on the CPU; 0 for XRT. */
int32_t unicorn_npu_is_double(void);

/* The version of the loaded XRT. It may be later than the version with which the shim was built. */
int32_t unicorn_npu_xrt_version(char *version, char *error);

int32_t unicorn_npu_device_open(uint32_t index, unicorn_npu_device **device, char *name, char *error);

/* Registers the xclbin, creates a hardware context for it, and opens its kernel with this name. */
int32_t unicorn_npu_kernel_open(unicorn_npu_device *device, const char *xclbin, const char *name,
                                unicorn_npu_kernel **kernel, char *error);

/* The memory bank of an argument of the kernel. */
int32_t unicorn_npu_group_id(unicorn_npu_kernel *kernel, int32_t argument, uint32_t *group, char *error);

/* Creates a buffer. `mapped` is its address in this process until it is closed. */
int32_t unicorn_npu_bo_open(unicorn_npu_device *device, uint64_t bytes, uint32_t flags, uint32_t group,
                            unicorn_npu_bo **bo, void **mapped, char *error);

/* Imports memory of another device, which it shares as a dma-buf of at least this size. The caller keeps the
 * descriptor, and may close it afterwards. Nothing is mapped for the caller. */
int32_t unicorn_npu_bo_import(unicorn_npu_device *device, int32_t descriptor, uint64_t bytes, unicorn_npu_bo **bo,
                              char *error);

/* A part of a buffer, as a separate buffer that keeps the memory of the whole buffer alive. */
int32_t unicorn_npu_bo_part(unicorn_npu_bo *whole, uint64_t offset, uint64_t bytes, unicorn_npu_bo **bo, char *error);

/* Moves the whole buffer between this process and the device. */
int32_t unicorn_npu_bo_sync(unicorn_npu_bo *bo, uint32_t direction, char *error);

/* Runs the kernel with the arguments opcode, instructions, their count in words, and then the buffers. Returns when it
 * has completed or failed, or when the deadline has passed. `state` is the command's last state (ert_cmd_state), or 0
 * if there is none. If a buffer is another device's memory, and XRT would replace it with a copy, nothing runs.
 *
 * After UNICORN_NPU_TIMEOUT the device may still use the buffers. This run and all buffers stay until the process ends,
 * even if they are closed, and every later call except close returns UNICORN_NPU_TIMEOUT. */
int32_t unicorn_npu_run(unicorn_npu_kernel *kernel, uint64_t opcode, unicorn_npu_bo *instructions, uint32_t words,
                        unicorn_npu_bo *const *buffers, uint32_t count, uint32_t deadline_ms, uint32_t *state,
                        char *error);

/* These functions cannot fail. A null pointer is allowed. */
void unicorn_npu_bo_close(unicorn_npu_bo *bo);
void unicorn_npu_kernel_close(unicorn_npu_kernel *kernel);
void unicorn_npu_device_close(unicorn_npu_device *device);

#ifdef __cplusplus
}
#endif

#endif
