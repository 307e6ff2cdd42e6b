/* The C ABI between Unicorn (src/npu/shim.rs) and XRT, whose own interface for NPUs is C++ alone.
 *
 * Two shared objects have it: `libunicorn_npu.so`, which `make npu-shim` builds from shim.cpp on the machine whose XRT it
 * calls, and the double of the tests (tests/npu/double). The functions are thin on purpose: which flags, group ids and
 * order a dispatch needs is decided in shim.rs, and the double checks it.
 *
 * Every function that can fail returns a code below, and says why in `error`, a line that ends in a 0. None throws. They
 * may be called by any thread, and by one at a time. */
#ifndef UNICORN_NPU_SHIM_H
#define UNICORN_NPU_SHIM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes with every change of this file. */
#define UNICORN_NPU_ABI 2

/* The bytes of each text, its 0 included. */
#define UNICORN_NPU_TEXT 1024

enum {
    UNICORN_NPU_OK = 0,
    /* XRT refused, in its own words. */
    UNICORN_NPU_XRT = -1,
    /* The command ended, and not completed. */
    UNICORN_NPU_COMMAND_STATE = -2,
    /* The command did not end in time; and what every later call returns. */
    UNICORN_NPU_TIMEOUT = -3,
    /* The kernel locks no more memory for this process. */
    UNICORN_NPU_MEMLOCK = -4,
    /* Other programs hold the columns. */
    UNICORN_NPU_NO_COLUMNS = -5,
    /* This user may not open the device. */
    UNICORN_NPU_GROUP = -6,
    UNICORN_NPU_NO_DEVICE = -7,
    UNICORN_NPU_BAD_ARGUMENT = -8,
    /* The memory of another device cannot be used in place. */
    UNICORN_NPU_DMA_BUF = -9,
};

/* How a buffer lies in memory, and which way it moves. */
enum { UNICORN_NPU_CACHEABLE = 1, UNICORN_NPU_HOST_ONLY = 2 };
enum { UNICORN_NPU_TO_DEVICE = 0, UNICORN_NPU_FROM_DEVICE = 1 };

typedef struct unicorn_npu_device unicorn_npu_device;
typedef struct unicorn_npu_kernel unicorn_npu_kernel;
typedef struct unicorn_npu_bo unicorn_npu_bo;

/* UNICORN_NPU_ABI of the shared object. Its meaning is the same in all versions. */
uint32_t unicorn_npu_abi(void);

/* 1 for the double of the tests, which computes on the CPU; 0 for XRT. */
int32_t unicorn_npu_is_double(void);

/* The version of XRT that is loaded, which may be a later one than the shim was built with. */
int32_t unicorn_npu_xrt_version(char *version, char *error);

int32_t unicorn_npu_device_open(uint32_t index, unicorn_npu_device **device, char *name, char *error);

/* Registers the xclbin, makes a hardware context for it, and takes its kernel of this name. */
int32_t unicorn_npu_kernel_open(unicorn_npu_device *device, const char *xclbin, const char *name,
                                unicorn_npu_kernel **kernel, char *error);

/* The memory bank of an argument of the kernel. */
int32_t unicorn_npu_group_id(unicorn_npu_kernel *kernel, int32_t argument, uint32_t *group, char *error);

/* A buffer, and where this process sees it until it is closed. */
int32_t unicorn_npu_bo_open(unicorn_npu_device *device, uint64_t bytes, uint32_t flags, uint32_t group,
                            unicorn_npu_bo **bo, void **mapped, char *error);

/* Memory of another device, which it shares as a dma-buf of at least so many bytes. The descriptor stays the caller's, who
 * may close it afterwards. Nothing is mapped for the caller. */
int32_t unicorn_npu_bo_import(unicorn_npu_device *device, int32_t descriptor, uint64_t bytes, unicorn_npu_bo **bo,
                              char *error);

/* Bytes of a buffer as a buffer of their own, which keeps the whole one's memory. */
int32_t unicorn_npu_bo_part(unicorn_npu_bo *whole, uint64_t offset, uint64_t bytes, unicorn_npu_bo **bo, char *error);

/* Moves the whole buffer between this process and the device. */
int32_t unicorn_npu_bo_sync(unicorn_npu_bo *bo, uint32_t direction, char *error);

/* Runs the kernel with the arguments opcode, instructions, their count in words, and then the buffers; returns once it
 * completed, failed, or the deadline passed. `state` is the command's last state (ert_cmd_state), 0 if there is none.
 * Nothing runs if a buffer is another device's memory, and XRT would give the command other memory than that.
 *
 * After UNICORN_NPU_TIMEOUT the device may still use the buffers: this run and all buffers stay until the process ends,
 * whatever is closed, and every later call but close returns UNICORN_NPU_TIMEOUT. */
int32_t unicorn_npu_run(unicorn_npu_kernel *kernel, uint64_t opcode, unicorn_npu_bo *instructions, uint32_t words,
                        unicorn_npu_bo *const *buffers, uint32_t count, uint32_t deadline_ms, uint32_t *state,
                        char *error);

/* None of these fails. A null pointer is no error. */
void unicorn_npu_bo_close(unicorn_npu_bo *bo);
void unicorn_npu_kernel_close(unicorn_npu_kernel *kernel);
void unicorn_npu_device_close(unicorn_npu_device *device);

#ifdef __cplusplus
}
#endif

#endif
