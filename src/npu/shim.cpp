// shim.h over XRT: device, xclbin, hardware context, kernel, buffers, run. `make npu-shim` builds it.
//
// XRT's C interface cannot do this: on a Ryzen AI, it refuses `xrtDeviceLoadXclbin` ("Operation not supported"), and it
// cannot register an xclbin. XRT 2.13 has no `xrt::hw_context`, but its library has the same soname, so this library
// does not load with it. shim.rs reports that.

#include "shim.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <system_error>

#include <xrt/experimental/xrt_version.h>
#include <xrt/experimental/xrt_xclbin.h>
#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_hw_context.h>
#include <xrt/xrt_kernel.h>

struct unicorn_npu_device {
    xrt::device device;
};

struct unicorn_npu_kernel {
    xrt::xclbin xclbin;
    xrt::hw_context context;
    xrt::kernel kernel;
};

struct unicorn_npu_bo {
    xrt::bo bo;
    // Whether the memory belongs to another device.
    bool imported;
};

namespace {

// Set if a command or another call did not end in time. The objects that it uses are then never freed.
std::atomic<bool> lost{false};

void say(char *text, const std::string &line) {
    if (text)
        std::snprintf(text, UNICORN_NPU_TEXT, "%s", line.c_str());
}

// The code of an errno that came from the driver through XRT.
int32_t code_of(int number, const std::string &what, int32_t otherwise) {
    switch (number) {
    case EAGAIN:
        return UNICORN_NPU_MEMLOCK;
    case ENOSPC:
        return UNICORN_NPU_NO_COLUMNS;
    case EACCES:
    case EPERM:
        return UNICORN_NPU_GROUP;
    case ENODEV:
    case ENXIO:
        return UNICORN_NPU_NO_DEVICE;
    case ETIME:
    case ETIMEDOUT:
        return UNICORN_NPU_TIMEOUT;
    }
    // Some exceptions of XRT have the errno only in their text: "... (err=11): Resource temporarily unavailable".
    const struct {
        const char *text;
        int32_t code;
    } texts[] = {
        {"err=-11)", UNICORN_NPU_MEMLOCK},
        {"err=11)", UNICORN_NPU_MEMLOCK},
        {"Resource temporarily unavailable", UNICORN_NPU_MEMLOCK},
        {"No space left on device", UNICORN_NPU_NO_COLUMNS},
        {"Permission denied", UNICORN_NPU_GROUP},
        {"No such device", UNICORN_NPU_NO_DEVICE},
        {"Could not open device with index", UNICORN_NPU_NO_DEVICE},
        {"Timer expired", UNICORN_NPU_TIMEOUT},
    };
    for (const auto &entry : texts)
        if (what.find(entry.text) != std::string::npos)
            return entry.code;
    return otherwise;
}

// The code and the text of the exception that is being handled.
int32_t caught(char *error) {
    try {
        throw;
    } catch (const xrt::run::command_error &e) {
        say(error, e.what());
        return e.get_command_state() == ERT_CMD_STATE_TIMEOUT ? UNICORN_NPU_TIMEOUT : UNICORN_NPU_COMMAND_STATE;
    } catch (const std::system_error &e) {
        say(error, e.what());
        return code_of(e.code().value(), e.what(), UNICORN_NPU_XRT);
    } catch (const std::exception &e) {
        say(error, e.what());
        return code_of(0, e.what(), UNICORN_NPU_XRT);
    } catch (...) {
        say(error, "an exception that is none of the C++ library's");
        return UNICORN_NPU_XRT;
    }
}

// As `caught`, for memory of another device. Every error except MEMLOCK and TIMEOUT becomes DMA_BUF, because copies
// avoid it.
int32_t caught_import(char *error) {
    int32_t code = caught(error);
    return code == UNICORN_NPU_MEMLOCK || code == UNICORN_NPU_TIMEOUT ? code : UNICORN_NPU_DMA_BUF;
}

// Whether the command contains the addresses of these buffers, one after the other, as MLIR_AIE expects them.
//
// XRT compares the bank of each buffer with the banks that the argument is connected to. If they differ, XRT logs a
// line, gives the command a copy in the argument's bank, and never copies the results back. XRT 2.25 makes no copy of
// imported buffers, but it makes copies of their parts: these have bank 0, which is HOST if mlir-aie made the
// container. With another container, 2.25 fails to make the copy, and throws. Another version may succeed.
bool has_addresses(const xrt::run &run, unicorn_npu_bo *const *buffers, uint32_t count) {
    const ert_packet *packet = run.get_ert_packet();
    for (uint32_t first = 0; first + 2 * count <= packet->count; first++) {
        uint32_t equal = 0;
        while (equal < count) {
            uint64_t address;
            std::memcpy(&address, packet->data + first + 2 * equal, sizeof address);
            if (address != buffers[equal]->bo.address())
                break;
            equal++;
        }
        if (equal == count)
            return true;
    }
    return false;
}

// The code of the state that a command is in after a wait.
int32_t code_of_state(uint32_t state, uint32_t deadline_ms, char *error) {
    switch (state) {
    case ERT_CMD_STATE_COMPLETED:
        return UNICORN_NPU_OK;
    case ERT_CMD_STATE_NEW:
    case ERT_CMD_STATE_QUEUED:
    case ERT_CMD_STATE_RUNNING:
    case ERT_CMD_STATE_SUBMITTED:
    case ERT_CMD_STATE_TIMEOUT:
    // The driver could not even reset the device.
    case ERT_CMD_STATE_NORESPONSE:
        say(error, "the command is in state " + std::to_string(state) + ", after " + std::to_string(deadline_ms) +
                       " ms at most");
        return UNICORN_NPU_TIMEOUT;
    default:
        say(error, "the command's state is " + std::to_string(state));
        return UNICORN_NPU_COMMAND_STATE;
    }
}

// Calls XRT, unless an earlier command or call did not end in time.
template <typename Body> int32_t guarded(char *error, Body &&body) {
    if (lost) {
        say(error, "an earlier call did not end in time");
        return UNICORN_NPU_TIMEOUT;
    }
    int32_t code;
    try {
        code = body();
    } catch (...) {
        code = caught(error);
    }
    if (code == UNICORN_NPU_TIMEOUT)
        lost = true;
    return code;
}

// A destructor of XRT could wait forever for a lost command, or throw and end the process.
template <typename Object> void closed(Object *object) {
    if (lost)
        return;
    try {
        delete object;
    } catch (...) {
    }
}

} // namespace

uint32_t unicorn_npu_abi(void) { return UNICORN_NPU_ABI; }

int32_t unicorn_npu_is_double(void) { return 0; }

int32_t unicorn_npu_xrt_version(char *version, char *error) {
    return guarded(error, [&] {
        say(version, std::to_string(xrt::version::major()) + "." + std::to_string(xrt::version::minor()));
        return UNICORN_NPU_OK;
    });
}

int32_t unicorn_npu_device_open(uint32_t index, unicorn_npu_device **device, char *name, char *error) {
    return guarded(error, [&] {
        xrt::device opened{index};
        say(name, opened.get_info<xrt::info::device::name>() + " at " + opened.get_info<xrt::info::device::bdf>());
        *device = new unicorn_npu_device{opened};
        return UNICORN_NPU_OK;
    });
}

int32_t unicorn_npu_kernel_open(unicorn_npu_device *device, const char *xclbin, const char *name,
                                unicorn_npu_kernel **kernel, char *error) {
    return guarded(error, [&] {
        xrt::xclbin container{std::string(xclbin)};
        auto id = device->device.register_xclbin(container);
        xrt::hw_context context{device->device, id};
        *kernel = new unicorn_npu_kernel{container, context, xrt::kernel{context, name}};
        return UNICORN_NPU_OK;
    });
}

int32_t unicorn_npu_group_id(unicorn_npu_kernel *kernel, int32_t argument, uint32_t *group, char *error) {
    return guarded(error, [&] {
        *group = static_cast<uint32_t>(kernel->kernel.group_id(argument));
        return UNICORN_NPU_OK;
    });
}

int32_t unicorn_npu_bo_open(unicorn_npu_device *device, uint64_t bytes, uint32_t flags, uint32_t group,
                            unicorn_npu_bo **bo, void **mapped, char *error) {
    return guarded(error, [&]() -> int32_t {
        xrt::bo::flags kind;
        switch (flags) {
        case UNICORN_NPU_CACHEABLE:
            kind = xrt::bo::flags::cacheable;
            break;
        case UNICORN_NPU_HOST_ONLY:
            kind = xrt::bo::flags::host_only;
            break;
        default:
            say(error, "a buffer is cacheable or host_only, not " + std::to_string(flags));
            return UNICORN_NPU_BAD_ARGUMENT;
        }
        xrt::bo made{device->device, bytes, kind, group};
        *mapped = made.map<void *>();
        *bo = new unicorn_npu_bo{made, false};
        return UNICORN_NPU_OK;
    });
}

int32_t unicorn_npu_bo_import(unicorn_npu_device *device, int32_t descriptor, uint64_t bytes, unicorn_npu_bo **bo,
                              char *error) {
    return guarded(error, [&]() -> int32_t {
        try {
            xrt::bo made{device->device, static_cast<xrt::bo::export_handle>(descriptor)};
            if (made.size() < bytes) {
                say(error, "the shared memory has " + std::to_string(made.size()) + " bytes, not " +
                               std::to_string(bytes));
                return UNICORN_NPU_DMA_BUF;
            }
            *bo = new unicorn_npu_bo{made, true};
            return UNICORN_NPU_OK;
        } catch (...) {
            return caught_import(error);
        }
    });
}

int32_t unicorn_npu_bo_part(unicorn_npu_bo *whole, uint64_t offset, uint64_t bytes, unicorn_npu_bo **bo, char *error) {
    return guarded(error, [&]() -> int32_t {
        uint64_t size = whole->bo.size();
        if (bytes == 0 || offset > size || bytes > size - offset) {
            say(error, std::to_string(bytes) + " bytes from " + std::to_string(offset) + " on, of a buffer of " +
                           std::to_string(size));
            return UNICORN_NPU_BAD_ARGUMENT;
        }
        try {
            *bo = new unicorn_npu_bo{xrt::bo{whole->bo, bytes, offset}, whole->imported};
            return UNICORN_NPU_OK;
        } catch (...) {
            return whole->imported ? caught_import(error) : caught(error);
        }
    });
}

int32_t unicorn_npu_bo_sync(unicorn_npu_bo *bo, uint32_t direction, char *error) {
    return guarded(error, [&] {
        bo->bo.sync(direction == UNICORN_NPU_TO_DEVICE ? XCL_BO_SYNC_BO_TO_DEVICE : XCL_BO_SYNC_BO_FROM_DEVICE);
        return UNICORN_NPU_OK;
    });
}

int32_t unicorn_npu_run(unicorn_npu_kernel *kernel, uint64_t opcode, unicorn_npu_bo *instructions, uint32_t words,
                        unicorn_npu_bo *const *buffers, uint32_t count, uint32_t deadline_ms, uint32_t *state,
                        char *error) {
    *state = 0;
    return guarded(error, [&]() -> int32_t {
        // A run whose command may still be in progress is never deleted.
        auto run = new xrt::run{kernel->kernel};
        bool started = false;
        // If XRT refuses imported buffers, copies of them may still work.
        bool imported = std::any_of(buffers, buffers + count, [](auto bo) { return bo->imported; });
        int32_t refusal = imported ? UNICORN_NPU_DMA_BUF : UNICORN_NPU_XRT;
        int32_t code;
        try {
            run->set_arg(0, opcode);
            run->set_arg(1, instructions->bo);
            run->set_arg(2, words);
            for (uint32_t i = 0; i < count; i++)
                run->set_arg(static_cast<int>(3 + i), buffers[i]->bo);
            if (!imported || has_addresses(*run, buffers, count)) {
                run->start();
                started = true;
                // A timeout of 0 ms means no timeout to XRT.
                *state = run->wait(std::chrono::milliseconds{deadline_ms ? deadline_ms : 1});
                code = code_of_state(*state, deadline_ms, error);
            } else {
                say(error, "XRT puts a copy of a buffer into the command: the kernel takes it in another bank");
                code = refusal;
            }
        } catch (...) {
            code = caught(error);
            // XRT also throws when a wait times out ("unexpected command state"), while the command is still in
            // progress.
            try {
                *state = run->state();
            } catch (...) {
            }
            bool ended = *state == ERT_CMD_STATE_ERROR || *state == ERT_CMD_STATE_ABORT ||
                         *state > ERT_CMD_STATE_NORESPONSE;
            if (started && !ended)
                code = UNICORN_NPU_TIMEOUT;
            else if (!started && code == UNICORN_NPU_XRT)
                code = refusal;
        }
        if (code != UNICORN_NPU_TIMEOUT)
            delete run;
        return code;
    });
}

void unicorn_npu_bo_close(unicorn_npu_bo *bo) { closed(bo); }

void unicorn_npu_kernel_close(unicorn_npu_kernel *kernel) { closed(kernel); }

void unicorn_npu_device_close(unicorn_npu_device *device) { closed(device); }
