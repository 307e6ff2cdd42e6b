//! `shim.h` in Rust: its constants, its opaque types, and a table of its functions, taken from a shared object.
//!
//! This module makes no decisions. [`super::shim`] calls the functions of the table. The test double implements them.

use std::ffi::{c_char, c_void};

use libloading::Library;

/// `UNICORN_NPU_ABI`.
pub const ABI: u32 = 2;

/// The bytes of each text, its 0 included.
pub const TEXT: usize = 1024;

pub const OK: i32 = 0;
pub const XRT: i32 = -1;
pub const COMMAND_STATE: i32 = -2;
pub const TIMEOUT: i32 = -3;
pub const MEMLOCK: i32 = -4;
pub const NO_COLUMNS: i32 = -5;
pub const GROUP: i32 = -6;
pub const NO_DEVICE: i32 = -7;
pub const BAD_ARGUMENT: i32 = -8;
pub const DMA_BUF: i32 = -9;

pub const CACHEABLE: u32 = 1;
pub const HOST_ONLY: u32 = 2;
pub const TO_DEVICE: u32 = 0;
pub const FROM_DEVICE: u32 = 1;

/// The kernel's first argument: instructions follow.
pub const OPCODE: u64 = 3;
/// The positions of the instructions and of the first buffer among the arguments. The number of instruction words is
/// between them.
pub const INSTRUCTIONS_ARGUMENT: i32 = 1;
pub const FIRST_BUFFER_ARGUMENT: i32 = 3;
/// The name of the kernel in each xclbin.
pub const KERNEL_NAME: &std::ffi::CStr = c"MLIR_AIE";

/// `ert_cmd_state` of XRT.
pub const STATE_COMPLETED: u32 = 4;
pub const STATE_ERROR: u32 = 5;
pub const STATE_TIMEOUT: u32 = 8;

#[repr(C)]
pub struct Device([u8; 0]);

#[repr(C)]
pub struct Kernel([u8; 0]);

#[repr(C)]
pub struct Bo([u8; 0]);

/// Declares the table, and the code that loads it.
macro_rules! functions {
    ($($field:ident = $symbol:literal: $type:ty;)*) => {
        /// The functions of a shared object, which must stay loaded while they are called.
        #[derive(Clone, Copy)]
        pub struct Functions {
            $(pub $field: $type,)*
        }

        impl Functions {
            /// Takes all functions from a shared object.
            ///
            /// # Safety
            ///
            /// The shared object's functions have the types of `shim.h`. A shared object with [`ABI`] promises that.
            pub unsafe fn of(library: &Library) -> Result<Functions, libloading::Error> {
                Ok(Functions {
                    $(
                        // SAFETY: the caller promises the type.
                        $field: *unsafe { library.get::<$type>($symbol)? },
                    )*
                })
            }
        }
    };
}

functions! {
    is_double = b"unicorn_npu_is_double\0": unsafe extern "C" fn() -> i32;
    xrt_version = b"unicorn_npu_xrt_version\0": unsafe extern "C" fn(*mut c_char, *mut c_char) -> i32;
    device_open = b"unicorn_npu_device_open\0":
        unsafe extern "C" fn(u32, *mut *mut Device, *mut c_char, *mut c_char) -> i32;
    kernel_open = b"unicorn_npu_kernel_open\0":
        unsafe extern "C" fn(*mut Device, *const c_char, *const c_char, *mut *mut Kernel, *mut c_char) -> i32;
    group_id = b"unicorn_npu_group_id\0": unsafe extern "C" fn(*mut Kernel, i32, *mut u32, *mut c_char) -> i32;
    bo_open = b"unicorn_npu_bo_open\0":
        unsafe extern "C" fn(*mut Device, u64, u32, u32, *mut *mut Bo, *mut *mut c_void, *mut c_char) -> i32;
    bo_import = b"unicorn_npu_bo_import\0":
        unsafe extern "C" fn(*mut Device, i32, u64, *mut *mut Bo, *mut c_char) -> i32;
    bo_part = b"unicorn_npu_bo_part\0":
        unsafe extern "C" fn(*mut Bo, u64, u64, *mut *mut Bo, *mut c_char) -> i32;
    bo_sync = b"unicorn_npu_bo_sync\0": unsafe extern "C" fn(*mut Bo, u32, *mut c_char) -> i32;
    run = b"unicorn_npu_run\0": unsafe extern "C" fn(
        *mut Kernel, u64, *mut Bo, u32, *const *mut Bo, u32, u32, *mut u32, *mut c_char,
    ) -> i32;
    bo_close = b"unicorn_npu_bo_close\0": unsafe extern "C" fn(*mut Bo);
    kernel_close = b"unicorn_npu_kernel_close\0": unsafe extern "C" fn(*mut Kernel);
    device_close = b"unicorn_npu_device_close\0": unsafe extern "C" fn(*mut Device);
}
