//! Start-up, errors, and looking functions up by name.

#![expect(unsafe_code, reason = "exports C functions")]

use std::ffi::CStr;
use std::sync::OnceLock;

use vmm_pool::driver::DriverCode;

use crate::abi::{Coded, Out, Symbol, Text, driver_api};
use crate::codes::name_of;
use crate::{errors, sim};

/// `CUdriverProcAddressQueryResult`.
const STATUS_SUCCESS: i32 = 0;
const STATUS_SYMBOL_NOT_FOUND: i32 = 1;
const STATUS_VERSION_NOT_SUFFICIENT: i32 = 2;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const FLAG_PER_THREAD: u64 = 2;

/// Checks what both forms of `cuGetProcAddress` ask of their arguments.
fn check_question(name: Text, version: i32) -> Coded<String> {
    let name = name.get()?;
    if name.is_empty() || version > sim::version() {
        return Err(DriverCode::INVALID_VALUE);
    }
    Ok(name)
}

/// Finds the newest form of `name` that a program of `version` knows.
fn find(name: &str, version: i32, flags: u64) -> Result<usize, i32> {
    static TABLE: OnceLock<Vec<Symbol>> = OnceLock::new();
    let forms = TABLE.get_or_init(super::symbols).iter().filter(|symbol| symbol.name == name);
    let newest =
        forms.clone().filter(|symbol| symbol.since <= version).max_by_key(|symbol| symbol.since);
    match newest {
        Some(symbol) if flags & FLAG_PER_THREAD != 0 => {
            Ok(symbol.per_thread.unwrap_or(symbol.address))
        }
        Some(symbol) => Ok(symbol.address),
        None if forms.count() == 0 => Err(STATUS_SYMBOL_NOT_FOUND),
        None => Err(STATUS_VERSION_NOT_SUFFICIENT),
    }
}

fn text_of(code: i32, text: Out<*const std::ffi::c_char>) -> Coded<()> {
    let Some(name) = name_of(code) else {
        text.put_if_wanted(std::ptr::null());
        return Err(DriverCode::INVALID_VALUE);
    };
    text.put(CStr::as_ptr(name))
}

driver_api! {
    fn cuInit = "cuInit" since 2000 (flags: u32) {
        if flags != 0 {
            return Err(DriverCode::INVALID_VALUE);
        }
        sim::init()
    }

    fn cuDriverGetVersion = "cuDriverGetVersion" since 2020 (version: Out<i32>) {
        version.put(sim::version())
    }

    fn cuGetExportTable = "cuGetExportTable" since 3000 (table: Out<usize>, _id: Out<[u8; 16]>) {
        // Of those who ask for tables, NVML does so without `cuInit`.
        if sim::get().is_err() {
            errors::note_management();
        }
        table.put(0)
    }

    fn cuGetErrorName = "cuGetErrorName" since 6000
        (code: i32, text: Out<*const std::ffi::c_char>)
    {
        text_of(code, text)
    }

    fn cuGetErrorString = "cuGetErrorString" since 6000
        (code: i32, text: Out<*const std::ffi::c_char>)
    {
        text_of(code, text)
    }

    fn cuGetProcAddress = "cuGetProcAddress" since 11030
        (name: Text, function: Out<usize>, version: i32, flags: u64)
    {
        let Ok(address) = find(&check_question(name, version)?, version, flags) else {
            function.put(0)?;
            return Err(DriverCode::NOT_FOUND);
        };
        function.put(address)
    }

    fn cuGetProcAddress_v2 = "cuGetProcAddress" since 12000
        (name: Text, function: Out<usize>, version: i32, flags: u64, status: Out<i32>)
    {
        match find(&check_question(name, version)?, version, flags) {
            Ok(address) => {
                status.put_if_wanted(STATUS_SUCCESS);
                function.put(address)
            }
            Err(reason) => {
                // Success with a null pointer is how this form says no; the first form fails.
                status.put_if_wanted(reason);
                function.put(0)
            }
        }
    }
}
