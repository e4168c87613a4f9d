//! NCCL's public functions under their own names, counted for the consistent cut.
//!
//! | verdict | means |
//! | --- | --- |
//! | count | counted, and held before a pause (`calls.rs`), then NCCL's own function |
//! | note | NCCL's own function; people are told once that a pause does not see it |
//! | pass | not hooked, for the reason given in the completeness test |
//!
//! From each row come an exported function that a library which links NCCL binds to instead of NCCL's, and
//! the answer of `dlsym` ([`lookup`](crate::lookup)). The exported function does not count itself: it looks
//! who calls, and jumps to the counting function, or to the caller's own NCCL when that is not the one we
//! watch (`libraries.rs`). The profiling names (`pnccl...`) are not hooked: a tool calls them after the
//! application has called the public ones, and `PyTorch` never does.

#![expect(unsafe_code, reason = "exports functions under NCCL's names and calls NCCL")]

pub(crate) mod calls;
pub(crate) mod libraries;

use std::arch::naked_asm;
use std::ffi::{CStr, c_int};

use sublet_nccl::collectives::NcclResult;

/// What is done with a function.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verdict {
    /// Counted by the function at this address.
    Count(fn() -> usize),
    /// NCCL's own, with a word to people.
    Note,
}

/// A row of the table.
#[derive(Debug)]
pub(crate) struct Row {
    /// The function's name.
    pub(crate) name: &'static CStr,
    /// What is done with it.
    pub(crate) verdict: Verdict,
    /// Our export of that name.
    exported: fn() -> usize,
}

impl Row {
    /// The address of our export of that name.
    pub(crate) fn exported(&self) -> usize {
        (self.exported)()
    }
}

macro_rules! nccl_functions {
    (count { $($counted:ident;)* } note { $($noted:ident;)* }) => {
        /// The functions by number.
        #[expect(
            non_camel_case_types,
            clippy::enum_variant_names,
            reason = "named as NCCL names them"
        )]
        #[derive(Clone, Copy, Debug)]
        #[repr(usize)]
        pub(crate) enum Function { $($counted,)* $($noted,)* }

        /// The table.
        pub(crate) const TABLE: &[Row] = &[
            $(Row {
                name: crate::hooks::c_name!($counted),
                verdict: Verdict::Count(|| (calls::$counted as *const ()).expose_provenance()),
                exported: || (exports::$counted as *const ()).expose_provenance(),
            },)*
            $(Row {
                name: crate::hooks::c_name!($noted),
                verdict: Verdict::Note,
                exported: || (exports::$noted as *const ()).expose_provenance(),
            },)*
        ];

        /// What is exported.
        pub mod exports {
            use super::{Function, choose, naked_asm};
            $(exported!($counted);)*
            $(exported!($noted);)*
        }
    };
}

/// A function that any caller's arguments pass through: it keeps their registers, asks where the call goes,
/// and jumps there. No function of NCCL's takes a vector register.
macro_rules! exported {
    ($symbol:ident) => {
        /// Goes to the function that counts, or to the caller's own NCCL.
        ///
        /// # Safety
        /// As NCCL's function of this name.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol() {
            naked_asm!(
                "push rdi",
                "push rsi",
                "push rdx",
                "push rcx",
                "push r8",
                "push r9",
                "mov rsi, qword ptr [rsp + 48]",
                "mov edi, {number}",
                "sub rsp, 8",
                "call {choose}",
                "add rsp, 8",
                "pop r9",
                "pop r8",
                "pop rcx",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "jmp rax",
                number = const Function::$symbol as usize,
                choose = sym choose,
            )
        }
    };
}

nccl_functions! {
    count {
        ncclAllGather;
        ncclAllReduce;
        ncclAlltoAll;
        ncclBcast;
        ncclBroadcast;
        ncclCommAbort;
        ncclCommDestroy;
        ncclCommFinalize;
        ncclCommGetAsyncError;
        ncclCommInitAll;
        ncclCommInitRank;
        ncclCommInitRankConfig;
        ncclCommInitRankScalable;
        ncclCommResume;
        ncclCommRevoke;
        ncclCommShrink;
        ncclCommSplit;
        ncclCommSuspend;
        ncclCommWindowDeregister;
        ncclCommWindowRegister;
        ncclDevCommCreate;
        ncclGather;
        ncclGroupEnd;
        ncclGroupSimulateEnd;
        ncclGroupStart;
        ncclRecv;
        ncclReduce;
        ncclReduceScatter;
        ncclScatter;
        ncclSend;
    }
    note {
        ncclCommGrow;
        ncclPutSignal;
        ncclSignal;
        ncclWaitSignal;
    }
}

/// Number of rows.
pub(crate) const FUNCTIONS: usize = TABLE.len();

/// The number of the function `name`.
pub(crate) fn number_of(name: &CStr) -> Option<usize> {
    if !name.to_bytes().starts_with(b"nccl") {
        return None;
    }
    TABLE.iter().position(|row| row.name == name)
}

/// The function that a call of number `number` from code at `caller` goes to. Never null.
extern "C" fn choose(number: usize, caller: usize) -> usize {
    let missing = || (no_nccl as *const ()).expose_provenance();
    match libraries::of_caller(caller) {
        Some((library, is_own)) if library.is_watched() && !is_own => target(library, number),
        Some((library, _)) => library.function(number),
        None => None,
    }
    .unwrap_or_else(missing)
}

/// What a call of function `number` of the NCCL that we watch goes to. `None` for one that this NCCL lacks: it
/// must not seem to be there.
fn target(library: &libraries::Library, number: usize) -> Option<usize> {
    let own = library.function(number)?;
    match TABLE[number].verdict {
        Verdict::Count(wrapper) => Some(wrapper()),
        Verdict::Note => {
            if let Some(member) = crate::runtime::member() {
                let name = TABLE[number].name.to_string_lossy();
                member.note(format!("{name} is used, which a pause in the middle does not see"));
            }
            Some(own)
        }
    }
}

/// What `dlsym` gives out for it: callers may ask for all names and use few.
pub(crate) fn answer(library: &libraries::Library, number: usize) -> Option<usize> {
    let row = &TABLE[number];
    library.function(number).map(|_| match row.verdict {
        Verdict::Count(wrapper) => wrapper(),
        Verdict::Note => row.exported(),
    })
}

/// Called where a program was linked against NCCL and none is in the process.
extern "C" fn no_nccl() -> c_int {
    NcclResult::SYSTEM_ERROR.0
}
