// A kernel driver amdxdna that is none: a library to be preloaded, which answers the ioctls and mappings that XRT makes on
// /dev/accel/accel0. tests/npu/real_xrt.py puts the node and the driver's folder in sysfs there, and builds this.
//
// A command is decoded as the firmware decodes it, and the attention that it asks for is computed at once, from the
// addresses in its packet, by the kernel's own model: `npu_double_attend` of the library that FAKE_AMDXDNA_MODEL names.
// The numbers and layouts are those of the kernel's include/uapi/drm/amdxdna_accel.h and drm.h, and of XRT's ert.h.
//
// Any file that can be mapped takes the place of a dma-buf.
//
//   FAKE_AMDXDNA_LOG    a file; each call appends an object to it, as a line of JSON
//   FAKE_AMDXDNA_FAULT  group    the node may not be opened
//                       memlock  no memory can be locked
//                       enospc   other programs hold all columns
//                       import   no dma-buf can be imported
//                       silence  commands never end
//                       timeout  commands end in the state TIMEOUT, as after the driver's own reset
//                       error    commands end in the state ERROR
//                       idle     commands end in the state COMPLETED, and nothing was computed

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define NODE "/dev/accel/accel0"

// --- the interface of the driver ------------------------------------------------------------------------

enum { GEM_CLOSE = 0x09, PRIME_FD_TO_HANDLE = 0x2e };
enum { FIRST_DRIVER_CALL = 0x40, LAST_DRIVER_CALL = 0x9f, SYNCOBJ_WAIT = 0xc3, SYNCOBJ_TIMELINE_WAIT = 0xca };
enum { CREATE_HWCTX, DESTROY_HWCTX, CONFIG_HWCTX, CREATE_BO, GET_BO_INFO, SYNC_BO, EXEC_CMD, GET_INFO };
enum { BO_SHARE = 1, BO_HEAP = 2, BO_DEVICE = 3, BO_COMMAND = 4 };
enum { QUERY_AIE_METADATA = 1 };
enum { STATE_COMPLETED = 4, STATE_ERROR = 5, STATE_TIMEOUT = 8 };

struct create_hwctx {
    uint64_t ext, ext_flags, qos;
    uint32_t umq_bo, log_bo, max_opc, tiles, mem_size, doorbell, handle, syncobj;
};

struct config_hwctx {
    uint32_t handle, type;
    uint64_t value;
    uint32_t size, pad;
};

struct create_bo {
    uint64_t flags, vaddr, size;
    uint32_t type, handle;
};

struct bo_info {
    uint64_t ext, ext_flags;
    uint32_t handle, pad;
    uint64_t map_offset, vaddr, device_address;
};

struct sync_bo {
    uint32_t handle, direction;
    uint64_t offset, bytes;
};

struct prime_handle {
    uint32_t handle, flags;
    int32_t file;
};

struct exec_cmd {
    uint64_t ext, ext_flags;
    uint32_t context, type;
    uint64_t commands, arguments;
    uint32_t command_count, argument_count;
    uint64_t sequence;
};

struct get_info {
    uint32_t parameter, size;
    uint64_t buffer;
};

// Rows of tiles of one kind.
struct tiles {
    uint16_t rows, first_row, dma_channels, locks, events, pad[3];
};

struct aie_metadata {
    uint32_t column_bytes;
    uint16_t columns, rows;
    uint32_t major, minor;
    struct tiles core, memory, shim;
};

// The arguments of MLIR_AIE as they lie in a command, without gaps.
struct __attribute__((packed)) arguments {
    uint64_t opcode, instructions;
    uint32_t words;
    uint64_t buffers[5];
};

// --- its state ------------------------------------------------------------------------------------------

enum { BUFFERS = 5, MAX_BOS = 1024, MAX_CONTEXTS = 6 };
#define DEVICE_BASE 0x4000000ull
#define DEVICE_ALIGN 0x8000ull
#define PAGE 4096ull

struct bo {
    int file;
    uint32_t type;
    int imported;
    uint64_t bytes, address;
    char *memory;
};

// A handle is an index; 0 is none.
static struct bo bos[MAX_BOS];
static uint32_t bo_count;
static struct bo *heap;
static uint64_t heap_used;
static int contexts;
static uint64_t sequence;

static int faulty(const char *fault) {
    const char *wanted = getenv("FAKE_AMDXDNA_FAULT");
    return wanted && !strcmp(wanted, fault);
}

static void note(const char *format, ...) {
    const char *path = getenv("FAKE_AMDXDNA_LOG");
    int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    if (file < 0)
        return;
    char line[2048];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    line[length] = '\n';
    if (write(file, line, length + 1) != length + 1)
        abort();
    close(file);
}

static int fails(int number) {
    errno = number;
    return -1;
}

static int is_node(int file) {
    char link[64], target[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, target, sizeof target - 1);
    return length == sizeof NODE - 1 && !memcmp(target, NODE, length);
}

// The buffer that an address of the device lies in, and the offset in it.
static struct bo *bo_at(uint64_t address, uint64_t *offset) {
    for (uint32_t i = 1; i <= bo_count; i++) {
        struct bo *bo = &bos[i];
        if (bo->type != BO_HEAP && address >= bo->address && address < bo->address + bo->bytes) {
            *offset = address - bo->address;
            return bo;
        }
    }
    return NULL;
}

// --- its calls ------------------------------------------------------------------------------------------

static int create_bo(struct create_bo *call) {
    if (bo_count + 1 == MAX_BOS)
        return fails(ENOMEM);
    struct bo *bo = &bos[++bo_count];
    bo->type = call->type;
    bo->bytes = call->size;
    note("{\"call\":\"create_bo\",\"type\":%u,\"bytes\":%lu,\"handle\":%u}", bo->type, bo->bytes, bo_count);
    if (bo->type == BO_DEVICE) {
        // The heap holds it.
        if (!heap)
            return fails(EINVAL);
        bo->file = -1;
        bo->address = DEVICE_BASE + heap_used;
        bo->memory = heap->memory + heap_used;
        heap_used += (bo->bytes + DEVICE_ALIGN - 1) & ~(DEVICE_ALIGN - 1);
    } else {
        uint64_t bytes = (bo->bytes + PAGE - 1) & ~(PAGE - 1);
        bo->file = memfd_create("bo", MFD_CLOEXEC);
        if (bo->file < 0 || ftruncate(bo->file, bytes))
            return fails(ENOMEM);
        bo->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, bo->file, 0);
        if (bo->type == BO_HEAP)
            heap = bo;
        // The device shares the page tables of the process.
        bo->address = bo->type == BO_HEAP ? DEVICE_BASE : (uint64_t)bo->memory;
    }
    call->handle = bo_count;
    return 0;
}

// The same file gets the same handle, as from DRM, as long as that is open.
static int import_bo(struct prime_handle *call) {
    if (faulty("import"))
        return fails(EINVAL);
    struct stat wanted, found;
    if (fstat(call->file, &wanted))
        return fails(EBADF);
    for (uint32_t i = 1; i <= bo_count; i++)
        if (bos[i].imported && !fstat(bos[i].file, &found) && found.st_dev == wanted.st_dev &&
            found.st_ino == wanted.st_ino) {
            call->handle = i;
            return 0;
        }
    if (bo_count + 1 == MAX_BOS)
        return fails(ENOMEM);
    struct bo *bo = &bos[bo_count + 1];
    bo->file = fcntl(call->file, F_DUPFD_CLOEXEC, 0);
    bo->bytes = wanted.st_size;
    bo->memory = mmap(NULL, bo->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, bo->file, 0);
    if (bo->file < 0 || bo->memory == MAP_FAILED)
        return fails(EINVAL);
    bo->type = BO_SHARE;
    bo->imported = 1;
    bo->address = (uint64_t)bo->memory;
    call->handle = ++bo_count;
    note("{\"call\":\"import\",\"bytes\":%lu,\"handle\":%u}", bo->bytes, bo_count);
    return 0;
}

static int close_bo(const uint32_t *handle) {
    struct bo *bo = &bos[*handle];
    note("{\"call\":\"close_bo\",\"handle\":%u,\"imported\":%d}", *handle, bo->imported);
    if (bo->imported) {
        munmap(bo->memory, bo->bytes);
        close(bo->file);
        // No address is in it any longer.
        memset(bo, 0, sizeof *bo);
    }
    return 0;
}

static int get_bo_info(struct bo_info *call) {
    struct bo *bo = &bos[call->handle];
    call->map_offset = bo->type == BO_DEVICE ? UINT64_MAX : (uint64_t)call->handle << 32;
    call->vaddr = 0;
    call->device_address = bo->address;
    return 0;
}

// XRT itself flushes the lines of the cache, unless it is told to leave that to the driver (Debug.force_driver_sync).
static int sync_bo(const struct sync_bo *call) {
    note("{\"call\":\"sync_bo\",\"handle\":%u,\"direction\":%u,\"offset\":%lu,\"bytes\":%lu}", call->handle,
         call->direction, call->offset, call->bytes);
    return 0;
}

static int create_context(struct create_hwctx *call) {
    note("{\"call\":\"create_hwctx\",\"has_qos\":%d,\"max_opc\":%u,\"tiles\":%u}", call->qos != 0, call->max_opc,
         call->tiles);
    if (!call->qos)
        return fails(EFAULT);
    if (faulty("enospc") || contexts == MAX_CONTEXTS)
        return fails(ENOSPC);
    contexts++;
    call->handle = contexts;
    call->syncobj = 7;
    call->doorbell = UINT32_MAX;
    return 0;
}

static int config_context(const struct config_hwctx *call) {
    const uint16_t *units = (const uint16_t *)call->value;
    note("{\"call\":\"config_hwctx\",\"type\":%u,\"units\":%u}", call->type, *units);
    return 0;
}

// Whether a call names a buffer, whose memory the driver then keeps in place until the command ends.
static int is_pinned(const struct exec_cmd *call, const struct bo *bo) {
    const uint32_t *handles = (const uint32_t *)call->arguments;
    for (uint32_t i = 0; i < call->argument_count; i++)
        if (&bos[handles[i]] == bo)
            return 1;
    return 0;
}

// Computes what a packet asks for, and returns the state that the command ends in.
static uint32_t compute(const struct exec_cmd *call, const struct arguments *arguments) {
    int (*attend)(uint8_t *const *, const uint64_t *) = NULL;
    const char *path = getenv("FAKE_AMDXDNA_MODEL");
    void *model = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (model)
        attend = (int (*)(uint8_t *const *, const uint64_t *))dlsym(model, "npu_double_attend");
    if (!attend) {
        const char *why = path ? dlerror() : "FAKE_AMDXDNA_MODEL is not set";
        note("{\"call\":\"model\",\"error\":\"%s\"}", why ? why : "unknown");
        return STATE_ERROR;
    }
    uint8_t *memory[BUFFERS];
    uint64_t bytes[BUFFERS];
    for (int i = 0; i < BUFFERS; i++) {
        uint64_t offset = 0;
        struct bo *bo = bo_at(arguments->buffers[i], &offset);
        if (!bo)
            return STATE_ERROR;
        memory[i] = (uint8_t *)bo->memory + offset;
        bytes[i] = bo->bytes - offset;
        note("{\"call\":\"buffer\",\"argument\":%d,\"type\":%u,\"bytes\":%lu,\"offset\":%lu,\"handle\":%u,"
             "\"imported\":%d,\"pinned\":%d}",
             i + 3, bo->type, bo->bytes, offset, (uint32_t)(bo - bos), bo->imported, is_pinned(call, bo));
    }
    int status = attend(memory, bytes);
    note("{\"call\":\"attend\",\"status\":%d}", status);
    return status ? STATE_ERROR : STATE_COMPLETED;
}

static int execute(struct exec_cmd *call) {
    struct bo *command = &bos[(uint32_t)call->commands];
    uint32_t *packet = (uint32_t *)command->memory;
    struct arguments arguments;
    memcpy(&arguments, packet + 2, sizeof arguments);
    uint64_t offset = 0;
    struct bo *instructions = bo_at(arguments.instructions, &offset);
    uint32_t first = 0;
    if (instructions)
        memcpy(&first, instructions->memory + offset, sizeof first);
    note("{\"call\":\"exec_cmd\",\"type\":%u,\"commands\":%u,\"header\":%u,\"cu_mask\":%u,\"opcode\":%lu,\"words\":%u,"
         "\"instructions\":{\"type\":%u,\"bytes\":%lu,\"offset\":%lu,\"first\":%u}}",
         command->type, call->command_count, packet[0], packet[1], arguments.opcode, arguments.words,
         instructions ? instructions->type : 0, instructions ? instructions->bytes : 0, offset, first);
    call->sequence = sequence++;
    if (faulty("silence"))
        return 0;
    uint32_t state = faulty("timeout") ? STATE_TIMEOUT
                     : faulty("error") ? STATE_ERROR
                     : faulty("idle")  ? STATE_COMPLETED
                                       : compute(call, &arguments);
    packet[0] = (packet[0] & ~0xfu) | state;
    return 0;
}

static int get_info(const struct get_info *call) {
    note("{\"call\":\"get_info\",\"parameter\":%u}", call->parameter);
    memset((void *)call->buffer, 0, call->size);
    // A Phoenix: five columns, of which four have a shim tile, and four rows of cores above one of memory.
    const struct aie_metadata phoenix = {
        .column_bytes = 0x2000000, .columns = 5, .rows = 6, .major = 1, .minor = 1,
        .core = {.rows = 4, .first_row = 2}, .memory = {.rows = 1, .first_row = 1}, .shim = {.rows = 1, .first_row = 0},
    };
    if (call->parameter == QUERY_AIE_METADATA)
        memcpy((void *)call->buffer, &phoenix, call->size < sizeof phoenix ? call->size : sizeof phoenix);
    return 0;
}

// --- what stands before the C library -------------------------------------------------------------------

int ioctl(int file, unsigned long request, ...) {
    static int (*next)(int, unsigned long, void *);
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (!next)
        next = (int (*)(int, unsigned long, void *))dlsym(RTLD_NEXT, "ioctl");
    if (_IOC_TYPE(request) != 'd' || !is_node(file))
        return next(file, request, argument);
    unsigned number = _IOC_NR(request);
    if (number == PRIME_FD_TO_HANDLE)
        return import_bo(argument);
    if (number == GEM_CLOSE)
        return close_bo(argument);
    if (number < FIRST_DRIVER_CALL || number > LAST_DRIVER_CALL) {
        int waits = number == SYNCOBJ_WAIT || number == SYNCOBJ_TIMELINE_WAIT;
        note("{\"call\":\"%s\",\"number\":%u}", waits ? "wait" : "drm", number);
        return waits && faulty("silence") ? (usleep(100000), fails(ETIME)) : 0;
    }
    switch (number - FIRST_DRIVER_CALL) {
    case CREATE_HWCTX:
        return create_context(argument);
    case DESTROY_HWCTX:
        note("{\"call\":\"destroy_hwctx\"}");
        contexts--;
        return 0;
    case CONFIG_HWCTX:
        return config_context(argument);
    case CREATE_BO:
        return create_bo(argument);
    case GET_BO_INFO:
        return get_bo_info(argument);
    case SYNC_BO:
        return sync_bo(argument);
    case EXEC_CMD:
        return execute(argument);
    case GET_INFO:
        return get_info(argument);
    default:
        note("{\"call\":\"unknown\",\"number\":%u}", number);
        return fails(EOPNOTSUPP);
    }
}

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    static void *(*next)(void *, size_t, int, int, int, off_t);
    if (!next)
        next = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    if (file < 0 || !is_node(file))
        return next(address, bytes, protection, flags, file, offset);
    int locked = (flags & MAP_LOCKED) != 0;
    note("{\"call\":\"mmap\",\"handle\":%lu,\"bytes\":%zu,\"locked\":%d}", (uint64_t)offset >> 32, bytes, locked);
    if (faulty("memlock")) {
        errno = EAGAIN;
        return MAP_FAILED;
    }
    return next(address, bytes, protection, flags & ~MAP_LOCKED, bos[offset >> 32].file, 0);
}

void *mmap64(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    return mmap(address, bytes, protection, flags, file, offset);
}

static int open_node(const char *name, const char *path, int flags, mode_t mode) {
    if (!strcmp(path, NODE) && faulty("group"))
        return fails(EACCES);
    int (*next)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name);
    return next(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    return open_node("open", path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    return open_node("open64", path, flags, mode);
}
