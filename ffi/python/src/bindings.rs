//! The C interface as found at run time, generated from `sublet.h` by `cargo xtask bindgen`.
//!
//! Never edited: change the header and run the command.

#![allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::pedantic,
    clippy::expect_used,
    clippy::multiple_unsafe_ops_per_block,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    missing_debug_implementations,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    reason = "generated from C, whose names and forms it keeps"
)]

pub const SUBLET_OK: u32 = 0;
pub const SUBLET_ERROR_ARGUMENT: u32 = 1;
pub const SUBLET_ERROR_NOT_JOINED: u32 = 2;
pub const SUBLET_ERROR_RETRY: u32 = 3;
pub const SUBLET_ERROR_REFUSED: u32 = 4;
pub const SUBLET_ERROR_OUT_OF_DEVICE_MEMORY: u32 = 5;
pub const SUBLET_ERROR_OUT_OF_HOST_MEMORY: u32 = 6;
pub const SUBLET_ERROR_LOST: u32 = 7;
pub const SUBLET_CONTENTS_KEEP: u32 = 0;
pub const SUBLET_CONTENTS_DISCARD: u32 = 1;
pub const SUBLET_CONTENTS_FILE: u32 = 2;
pub const SUBLET_WHOSE_TENANT: u32 = 0;
pub const SUBLET_WHOSE_PROCESS: u32 = 1;
pub type sublet_unused_source =
    ::core::option::Option<unsafe extern "C" fn(context: *mut ::core::ffi::c_void, token: u64)>;
pub struct Functions {
    __library: ::libloading::Library,
    pub sublet_version:
        Result<unsafe extern "C" fn() -> *const ::core::ffi::c_char, ::libloading::Error>,
    pub sublet_last_error:
        Result<unsafe extern "C" fn() -> *const ::core::ffi::c_char, ::libloading::Error>,
    pub sublet_last_error_json: Result<
        unsafe extern "C" fn(buffer: *mut ::core::ffi::c_char, size: usize) -> i64,
        ::libloading::Error,
    >,
    pub sublet_last_report_json: Result<
        unsafe extern "C" fn(buffer: *mut ::core::ffi::c_char, size: usize) -> i64,
        ::libloading::Error,
    >,
    pub sublet_pause_tenant: Result<
        unsafe extern "C" fn(
            tenant: *const ::core::ffi::c_char,
            timeout_ms: u32,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_resume_tenant: Result<
        unsafe extern "C" fn(
            tenant: *const ::core::ffi::c_char,
            timeout_ms: u32,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_resume_in_turn: Result<
        unsafe extern "C" fn(
            tenant: *const ::core::ffi::c_char,
            wait_ms: u32,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_swap_tenants: Result<
        unsafe extern "C" fn(
            from: *const ::core::ffi::c_char,
            to: *const ::core::ffi::c_char,
            timeout_ms: u32,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_swap_tags: Result<
        unsafe extern "C" fn(
            from: *const ::core::ffi::c_char,
            out_tags: *const *const ::core::ffi::c_char,
            out_count: usize,
            to: *const ::core::ffi::c_char,
            in_tags: *const *const ::core::ffi::c_char,
            in_count: usize,
            timeout_ms: u32,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_switch_tenant: Result<
        unsafe extern "C" fn(
            tenant: *const ::core::ffi::c_char,
            wait_ms: u32,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_turn_begin:
        Result<unsafe extern "C" fn(wait_ms: u32) -> ::core::ffi::c_int, ::libloading::Error>,
    pub sublet_turn_end: Result<unsafe extern "C" fn() -> ::core::ffi::c_int, ::libloading::Error>,
    pub sublet_prepare_tenant: Result<
        unsafe extern "C" fn(
            tenant: *const ::core::ffi::c_char,
            wait_ms: u32,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_set_budget: Result<
        unsafe extern "C" fn(
            tenant: *const ::core::ffi::c_char,
            budgets: *const ::core::ffi::c_char,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_budget_json: Result<
        unsafe extern "C" fn(
            tenant: *const ::core::ffi::c_char,
            buffer: *mut ::core::ffi::c_char,
            size: usize,
        ) -> i64,
        ::libloading::Error,
    >,
    pub sublet_pause_tags: Result<
        unsafe extern "C" fn(
            tenant: *const ::core::ffi::c_char,
            tags: *const *const ::core::ffi::c_char,
            count: usize,
            whose: ::core::ffi::c_int,
            timeout_ms: u32,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_resume_tags: Result<
        unsafe extern "C" fn(
            tenant: *const ::core::ffi::c_char,
            tags: *const *const ::core::ffi::c_char,
            count: usize,
            whose: ::core::ffi::c_int,
            timeout_ms: u32,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_is_paused: Result<unsafe extern "C" fn() -> ::core::ffi::c_int, ::libloading::Error>,
    pub sublet_tag_is_paused: Result<
        unsafe extern "C" fn(tag: *const ::core::ffi::c_char) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_changes: Result<unsafe extern "C" fn() -> u64, ::libloading::Error>,
    pub sublet_region_begin: Result<
        unsafe extern "C" fn(
            tag: *const ::core::ffi::c_char,
            contents: ::core::ffi::c_int,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_region_begin_on: Result<
        unsafe extern "C" fn(
            tag: *const ::core::ffi::c_char,
            contents: ::core::ffi::c_int,
            device: ::core::ffi::c_int,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_region_begin_none:
        Result<unsafe extern "C" fn() -> ::core::ffi::c_int, ::libloading::Error>,
    pub sublet_region_end:
        Result<unsafe extern "C" fn() -> ::core::ffi::c_int, ::libloading::Error>,
    pub sublet_region_begin_all_threads: Result<
        unsafe extern "C" fn(
            tag: *const ::core::ffi::c_char,
            contents: ::core::ffi::c_int,
            device: ::core::ffi::c_int,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_region_end_all_threads:
        Result<unsafe extern "C" fn() -> ::core::ffi::c_int, ::libloading::Error>,
    pub sublet_set_file_dir: Result<
        unsafe extern "C" fn(path: *const ::core::ffi::c_char) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_host_copy: Result<
        unsafe extern "C" fn(
            address: u64,
            size_bytes: u64,
            host: *mut *const ::core::ffi::c_void,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_host_copy_out: Result<
        unsafe extern "C" fn(
            address: u64,
            size_bytes: u64,
            target: *mut ::core::ffi::c_void,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_set_unused_source: Result<
        unsafe extern "C" fn(
            source: sublet_unused_source,
            context: *mut ::core::ffi::c_void,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_unused: Result<
        unsafe extern "C" fn(
            token: u64,
            starts: *const u64,
            sizes: *const u64,
            count: usize,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_page_open: Result<
        unsafe extern "C" fn(
            device: ::core::ffi::c_int,
            window_bytes: u64,
            chunk_bytes: u64,
            frames_bytes: u64,
            pager: *mut u64,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_page_close:
        Result<unsafe extern "C" fn(pager: u64) -> ::core::ffi::c_int, ::libloading::Error>,
    pub sublet_page_alloc: Result<
        unsafe extern "C" fn(pager: u64, size_bytes: u64, span: *mut u64) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_page_free: Result<
        unsafe extern "C" fn(pager: u64, span: u64) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_page_acquire: Result<
        unsafe extern "C" fn(
            pager: u64,
            spans: *const u64,
            count: usize,
            stream: u64,
            timeout_ms: u32,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_page_release: Result<
        unsafe extern "C" fn(
            pager: u64,
            spans: *const u64,
            count: usize,
            stream: u64,
            has_written: ::core::ffi::c_int,
        ) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_page_announce: Result<
        unsafe extern "C" fn(pager: u64, spans: *const u64, count: usize) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_page_flush: Result<
        unsafe extern "C" fn(pager: u64, timeout_ms: u32) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_page_set_frames: Result<
        unsafe extern "C" fn(pager: u64, frames_bytes: u64, timeout_ms: u32) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_page_json: Result<
        unsafe extern "C" fn(pager: u64, buffer: *mut ::core::ffi::c_char, size: usize) -> i64,
        ::libloading::Error,
    >,
    pub sublet_torch_malloc: Result<
        unsafe extern "C" fn(
            size: isize,
            device: ::core::ffi::c_int,
            stream: *mut ::core::ffi::c_void,
        ) -> *mut ::core::ffi::c_void,
        ::libloading::Error,
    >,
    pub sublet_torch_free: Result<
        unsafe extern "C" fn(
            ptr: *mut ::core::ffi::c_void,
            size: isize,
            device: ::core::ffi::c_int,
            stream: *mut ::core::ffi::c_void,
        ),
        ::libloading::Error,
    >,
    pub sublet_stats_json: Result<
        unsafe extern "C" fn(buffer: *mut ::core::ffi::c_char, size: usize) -> i64,
        ::libloading::Error,
    >,
    pub sublet_tenant_stats_json: Result<
        unsafe extern "C" fn(
            tenant: *const ::core::ffi::c_char,
            buffer: *mut ::core::ffi::c_char,
            size: usize,
        ) -> i64,
        ::libloading::Error,
    >,
    pub sublet_tenants_json: Result<
        unsafe extern "C" fn(buffer: *mut ::core::ffi::c_char, size: usize) -> i64,
        ::libloading::Error,
    >,
    pub ncclPause: Result<
        unsafe extern "C" fn(comm: *mut ::core::ffi::c_void) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub ncclResume: Result<
        unsafe extern "C" fn(comm: *mut ::core::ffi::c_void) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub ncclMemStats: Result<unsafe extern "C" fn() -> ::core::ffi::c_int, ::libloading::Error>,
    pub ncclSetGroupID: Result<
        unsafe extern "C" fn(id: ::core::ffi::c_int) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub ncclGetGroupID: Result<
        unsafe extern "C" fn(id: *mut ::core::ffi::c_int) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_set_family: Result<
        unsafe extern "C" fn(family: *const ::core::ffi::c_char) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_attach: Result<
        unsafe extern "C" fn(tenant: *const ::core::ffi::c_char) -> ::core::ffi::c_int,
        ::libloading::Error,
    >,
    pub sublet_attach_report_json: Result<
        unsafe extern "C" fn(buffer: *mut ::core::ffi::c_char, size: usize) -> i64,
        ::libloading::Error,
    >,
}
impl Functions {
    pub unsafe fn new<P>(path: P) -> Result<Self, ::libloading::Error>
    where
        P: AsRef<::std::ffi::OsStr>,
    {
        let path = path.as_ref();
        let library = ::libloading::Library::new(path)?;
        Self::from_library(library)
    }
    pub unsafe fn from_library<L>(library: L) -> Result<Self, ::libloading::Error>
    where
        L: Into<::libloading::Library>,
    {
        let __library = library.into();
        let sublet_version = __library.get(b"sublet_version\0").map(|sym| *sym);
        let sublet_last_error = __library.get(b"sublet_last_error\0").map(|sym| *sym);
        let sublet_last_error_json = __library.get(b"sublet_last_error_json\0").map(|sym| *sym);
        let sublet_last_report_json = __library.get(b"sublet_last_report_json\0").map(|sym| *sym);
        let sublet_pause_tenant = __library.get(b"sublet_pause_tenant\0").map(|sym| *sym);
        let sublet_resume_tenant = __library.get(b"sublet_resume_tenant\0").map(|sym| *sym);
        let sublet_resume_in_turn = __library.get(b"sublet_resume_in_turn\0").map(|sym| *sym);
        let sublet_swap_tenants = __library.get(b"sublet_swap_tenants\0").map(|sym| *sym);
        let sublet_swap_tags = __library.get(b"sublet_swap_tags\0").map(|sym| *sym);
        let sublet_switch_tenant = __library.get(b"sublet_switch_tenant\0").map(|sym| *sym);
        let sublet_turn_begin = __library.get(b"sublet_turn_begin\0").map(|sym| *sym);
        let sublet_turn_end = __library.get(b"sublet_turn_end\0").map(|sym| *sym);
        let sublet_prepare_tenant = __library.get(b"sublet_prepare_tenant\0").map(|sym| *sym);
        let sublet_set_budget = __library.get(b"sublet_set_budget\0").map(|sym| *sym);
        let sublet_budget_json = __library.get(b"sublet_budget_json\0").map(|sym| *sym);
        let sublet_pause_tags = __library.get(b"sublet_pause_tags\0").map(|sym| *sym);
        let sublet_resume_tags = __library.get(b"sublet_resume_tags\0").map(|sym| *sym);
        let sublet_is_paused = __library.get(b"sublet_is_paused\0").map(|sym| *sym);
        let sublet_tag_is_paused = __library.get(b"sublet_tag_is_paused\0").map(|sym| *sym);
        let sublet_changes = __library.get(b"sublet_changes\0").map(|sym| *sym);
        let sublet_region_begin = __library.get(b"sublet_region_begin\0").map(|sym| *sym);
        let sublet_region_begin_on = __library.get(b"sublet_region_begin_on\0").map(|sym| *sym);
        let sublet_region_begin_none = __library.get(b"sublet_region_begin_none\0").map(|sym| *sym);
        let sublet_region_end = __library.get(b"sublet_region_end\0").map(|sym| *sym);
        let sublet_region_begin_all_threads =
            __library.get(b"sublet_region_begin_all_threads\0").map(|sym| *sym);
        let sublet_region_end_all_threads =
            __library.get(b"sublet_region_end_all_threads\0").map(|sym| *sym);
        let sublet_set_file_dir = __library.get(b"sublet_set_file_dir\0").map(|sym| *sym);
        let sublet_host_copy = __library.get(b"sublet_host_copy\0").map(|sym| *sym);
        let sublet_host_copy_out = __library.get(b"sublet_host_copy_out\0").map(|sym| *sym);
        let sublet_set_unused_source = __library.get(b"sublet_set_unused_source\0").map(|sym| *sym);
        let sublet_unused = __library.get(b"sublet_unused\0").map(|sym| *sym);
        let sublet_page_open = __library.get(b"sublet_page_open\0").map(|sym| *sym);
        let sublet_page_close = __library.get(b"sublet_page_close\0").map(|sym| *sym);
        let sublet_page_alloc = __library.get(b"sublet_page_alloc\0").map(|sym| *sym);
        let sublet_page_free = __library.get(b"sublet_page_free\0").map(|sym| *sym);
        let sublet_page_acquire = __library.get(b"sublet_page_acquire\0").map(|sym| *sym);
        let sublet_page_release = __library.get(b"sublet_page_release\0").map(|sym| *sym);
        let sublet_page_announce = __library.get(b"sublet_page_announce\0").map(|sym| *sym);
        let sublet_page_flush = __library.get(b"sublet_page_flush\0").map(|sym| *sym);
        let sublet_page_set_frames = __library.get(b"sublet_page_set_frames\0").map(|sym| *sym);
        let sublet_page_json = __library.get(b"sublet_page_json\0").map(|sym| *sym);
        let sublet_torch_malloc = __library.get(b"sublet_torch_malloc\0").map(|sym| *sym);
        let sublet_torch_free = __library.get(b"sublet_torch_free\0").map(|sym| *sym);
        let sublet_stats_json = __library.get(b"sublet_stats_json\0").map(|sym| *sym);
        let sublet_tenant_stats_json = __library.get(b"sublet_tenant_stats_json\0").map(|sym| *sym);
        let sublet_tenants_json = __library.get(b"sublet_tenants_json\0").map(|sym| *sym);
        let ncclPause = __library.get(b"ncclPause\0").map(|sym| *sym);
        let ncclResume = __library.get(b"ncclResume\0").map(|sym| *sym);
        let ncclMemStats = __library.get(b"ncclMemStats\0").map(|sym| *sym);
        let ncclSetGroupID = __library.get(b"ncclSetGroupID\0").map(|sym| *sym);
        let ncclGetGroupID = __library.get(b"ncclGetGroupID\0").map(|sym| *sym);
        let sublet_set_family = __library.get(b"sublet_set_family\0").map(|sym| *sym);
        let sublet_attach = __library.get(b"sublet_attach\0").map(|sym| *sym);
        let sublet_attach_report_json =
            __library.get(b"sublet_attach_report_json\0").map(|sym| *sym);
        Ok(Functions {
            __library,
            sublet_version,
            sublet_last_error,
            sublet_last_error_json,
            sublet_last_report_json,
            sublet_pause_tenant,
            sublet_resume_tenant,
            sublet_resume_in_turn,
            sublet_swap_tenants,
            sublet_swap_tags,
            sublet_switch_tenant,
            sublet_turn_begin,
            sublet_turn_end,
            sublet_prepare_tenant,
            sublet_set_budget,
            sublet_budget_json,
            sublet_pause_tags,
            sublet_resume_tags,
            sublet_is_paused,
            sublet_tag_is_paused,
            sublet_changes,
            sublet_region_begin,
            sublet_region_begin_on,
            sublet_region_begin_none,
            sublet_region_end,
            sublet_region_begin_all_threads,
            sublet_region_end_all_threads,
            sublet_set_file_dir,
            sublet_host_copy,
            sublet_host_copy_out,
            sublet_set_unused_source,
            sublet_unused,
            sublet_page_open,
            sublet_page_close,
            sublet_page_alloc,
            sublet_page_free,
            sublet_page_acquire,
            sublet_page_release,
            sublet_page_announce,
            sublet_page_flush,
            sublet_page_set_frames,
            sublet_page_json,
            sublet_torch_malloc,
            sublet_torch_free,
            sublet_stats_json,
            sublet_tenant_stats_json,
            sublet_tenants_json,
            ncclPause,
            ncclResume,
            ncclMemStats,
            ncclSetGroupID,
            ncclGetGroupID,
            sublet_set_family,
            sublet_attach,
            sublet_attach_report_json,
        })
    }
    pub unsafe fn sublet_version(&self) -> *const ::core::ffi::c_char {
        (self.sublet_version.as_ref().expect("Expected function, got error."))()
    }
    pub unsafe fn sublet_last_error(&self) -> *const ::core::ffi::c_char {
        (self.sublet_last_error.as_ref().expect("Expected function, got error."))()
    }
    pub unsafe fn sublet_last_error_json(
        &self,
        buffer: *mut ::core::ffi::c_char,
        size: usize,
    ) -> i64 {
        (self.sublet_last_error_json.as_ref().expect("Expected function, got error."))(buffer, size)
    }
    pub unsafe fn sublet_last_report_json(
        &self,
        buffer: *mut ::core::ffi::c_char,
        size: usize,
    ) -> i64 {
        (self.sublet_last_report_json.as_ref().expect("Expected function, got error."))(
            buffer, size,
        )
    }
    pub unsafe fn sublet_pause_tenant(
        &self,
        tenant: *const ::core::ffi::c_char,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int {
        (self.sublet_pause_tenant.as_ref().expect("Expected function, got error."))(
            tenant, timeout_ms,
        )
    }
    pub unsafe fn sublet_resume_tenant(
        &self,
        tenant: *const ::core::ffi::c_char,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int {
        (self.sublet_resume_tenant.as_ref().expect("Expected function, got error."))(
            tenant, timeout_ms,
        )
    }
    pub unsafe fn sublet_resume_in_turn(
        &self,
        tenant: *const ::core::ffi::c_char,
        wait_ms: u32,
    ) -> ::core::ffi::c_int {
        (self.sublet_resume_in_turn.as_ref().expect("Expected function, got error."))(
            tenant, wait_ms,
        )
    }
    pub unsafe fn sublet_swap_tenants(
        &self,
        from: *const ::core::ffi::c_char,
        to: *const ::core::ffi::c_char,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int {
        (self.sublet_swap_tenants.as_ref().expect("Expected function, got error."))(
            from, to, timeout_ms,
        )
    }
    pub unsafe fn sublet_swap_tags(
        &self,
        from: *const ::core::ffi::c_char,
        out_tags: *const *const ::core::ffi::c_char,
        out_count: usize,
        to: *const ::core::ffi::c_char,
        in_tags: *const *const ::core::ffi::c_char,
        in_count: usize,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int {
        (self.sublet_swap_tags.as_ref().expect("Expected function, got error."))(
            from, out_tags, out_count, to, in_tags, in_count, timeout_ms,
        )
    }
    pub unsafe fn sublet_switch_tenant(
        &self,
        tenant: *const ::core::ffi::c_char,
        wait_ms: u32,
    ) -> ::core::ffi::c_int {
        (self.sublet_switch_tenant.as_ref().expect("Expected function, got error."))(
            tenant, wait_ms,
        )
    }
    pub unsafe fn sublet_turn_begin(&self, wait_ms: u32) -> ::core::ffi::c_int {
        (self.sublet_turn_begin.as_ref().expect("Expected function, got error."))(wait_ms)
    }
    pub unsafe fn sublet_turn_end(&self) -> ::core::ffi::c_int {
        (self.sublet_turn_end.as_ref().expect("Expected function, got error."))()
    }
    pub unsafe fn sublet_prepare_tenant(
        &self,
        tenant: *const ::core::ffi::c_char,
        wait_ms: u32,
    ) -> ::core::ffi::c_int {
        (self.sublet_prepare_tenant.as_ref().expect("Expected function, got error."))(
            tenant, wait_ms,
        )
    }
    pub unsafe fn sublet_set_budget(
        &self,
        tenant: *const ::core::ffi::c_char,
        budgets: *const ::core::ffi::c_char,
    ) -> ::core::ffi::c_int {
        (self.sublet_set_budget.as_ref().expect("Expected function, got error."))(tenant, budgets)
    }
    pub unsafe fn sublet_budget_json(
        &self,
        tenant: *const ::core::ffi::c_char,
        buffer: *mut ::core::ffi::c_char,
        size: usize,
    ) -> i64 {
        (self.sublet_budget_json.as_ref().expect("Expected function, got error."))(
            tenant, buffer, size,
        )
    }
    pub unsafe fn sublet_pause_tags(
        &self,
        tenant: *const ::core::ffi::c_char,
        tags: *const *const ::core::ffi::c_char,
        count: usize,
        whose: ::core::ffi::c_int,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int {
        (self.sublet_pause_tags.as_ref().expect("Expected function, got error."))(
            tenant, tags, count, whose, timeout_ms,
        )
    }
    pub unsafe fn sublet_resume_tags(
        &self,
        tenant: *const ::core::ffi::c_char,
        tags: *const *const ::core::ffi::c_char,
        count: usize,
        whose: ::core::ffi::c_int,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int {
        (self.sublet_resume_tags.as_ref().expect("Expected function, got error."))(
            tenant, tags, count, whose, timeout_ms,
        )
    }
    pub unsafe fn sublet_is_paused(&self) -> ::core::ffi::c_int {
        (self.sublet_is_paused.as_ref().expect("Expected function, got error."))()
    }
    pub unsafe fn sublet_tag_is_paused(
        &self,
        tag: *const ::core::ffi::c_char,
    ) -> ::core::ffi::c_int {
        (self.sublet_tag_is_paused.as_ref().expect("Expected function, got error."))(tag)
    }
    pub unsafe fn sublet_changes(&self) -> u64 {
        (self.sublet_changes.as_ref().expect("Expected function, got error."))()
    }
    pub unsafe fn sublet_region_begin(
        &self,
        tag: *const ::core::ffi::c_char,
        contents: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int {
        (self.sublet_region_begin.as_ref().expect("Expected function, got error."))(tag, contents)
    }
    pub unsafe fn sublet_region_begin_on(
        &self,
        tag: *const ::core::ffi::c_char,
        contents: ::core::ffi::c_int,
        device: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int {
        (self.sublet_region_begin_on.as_ref().expect("Expected function, got error."))(
            tag, contents, device,
        )
    }
    pub unsafe fn sublet_region_begin_none(&self) -> ::core::ffi::c_int {
        (self.sublet_region_begin_none.as_ref().expect("Expected function, got error."))()
    }
    pub unsafe fn sublet_region_end(&self) -> ::core::ffi::c_int {
        (self.sublet_region_end.as_ref().expect("Expected function, got error."))()
    }
    pub unsafe fn sublet_region_begin_all_threads(
        &self,
        tag: *const ::core::ffi::c_char,
        contents: ::core::ffi::c_int,
        device: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int {
        (self.sublet_region_begin_all_threads.as_ref().expect("Expected function, got error."))(
            tag, contents, device,
        )
    }
    pub unsafe fn sublet_region_end_all_threads(&self) -> ::core::ffi::c_int {
        (self.sublet_region_end_all_threads.as_ref().expect("Expected function, got error."))()
    }
    pub unsafe fn sublet_set_file_dir(
        &self,
        path: *const ::core::ffi::c_char,
    ) -> ::core::ffi::c_int {
        (self.sublet_set_file_dir.as_ref().expect("Expected function, got error."))(path)
    }
    pub unsafe fn sublet_host_copy(
        &self,
        address: u64,
        size_bytes: u64,
        host: *mut *const ::core::ffi::c_void,
    ) -> ::core::ffi::c_int {
        (self.sublet_host_copy.as_ref().expect("Expected function, got error."))(
            address, size_bytes, host,
        )
    }
    pub unsafe fn sublet_host_copy_out(
        &self,
        address: u64,
        size_bytes: u64,
        target: *mut ::core::ffi::c_void,
    ) -> ::core::ffi::c_int {
        (self.sublet_host_copy_out.as_ref().expect("Expected function, got error."))(
            address, size_bytes, target,
        )
    }
    pub unsafe fn sublet_set_unused_source(
        &self,
        source: sublet_unused_source,
        context: *mut ::core::ffi::c_void,
    ) -> ::core::ffi::c_int {
        (self.sublet_set_unused_source.as_ref().expect("Expected function, got error."))(
            source, context,
        )
    }
    pub unsafe fn sublet_unused(
        &self,
        token: u64,
        starts: *const u64,
        sizes: *const u64,
        count: usize,
    ) -> ::core::ffi::c_int {
        (self.sublet_unused.as_ref().expect("Expected function, got error."))(
            token, starts, sizes, count,
        )
    }
    pub unsafe fn sublet_page_open(
        &self,
        device: ::core::ffi::c_int,
        window_bytes: u64,
        chunk_bytes: u64,
        frames_bytes: u64,
        pager: *mut u64,
    ) -> ::core::ffi::c_int {
        (self.sublet_page_open.as_ref().expect("Expected function, got error."))(
            device,
            window_bytes,
            chunk_bytes,
            frames_bytes,
            pager,
        )
    }
    pub unsafe fn sublet_page_close(&self, pager: u64) -> ::core::ffi::c_int {
        (self.sublet_page_close.as_ref().expect("Expected function, got error."))(pager)
    }
    pub unsafe fn sublet_page_alloc(
        &self,
        pager: u64,
        size_bytes: u64,
        span: *mut u64,
    ) -> ::core::ffi::c_int {
        (self.sublet_page_alloc.as_ref().expect("Expected function, got error."))(
            pager, size_bytes, span,
        )
    }
    pub unsafe fn sublet_page_free(&self, pager: u64, span: u64) -> ::core::ffi::c_int {
        (self.sublet_page_free.as_ref().expect("Expected function, got error."))(pager, span)
    }
    pub unsafe fn sublet_page_acquire(
        &self,
        pager: u64,
        spans: *const u64,
        count: usize,
        stream: u64,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int {
        (self.sublet_page_acquire.as_ref().expect("Expected function, got error."))(
            pager, spans, count, stream, timeout_ms,
        )
    }
    pub unsafe fn sublet_page_release(
        &self,
        pager: u64,
        spans: *const u64,
        count: usize,
        stream: u64,
        has_written: ::core::ffi::c_int,
    ) -> ::core::ffi::c_int {
        (self.sublet_page_release.as_ref().expect("Expected function, got error."))(
            pager,
            spans,
            count,
            stream,
            has_written,
        )
    }
    pub unsafe fn sublet_page_announce(
        &self,
        pager: u64,
        spans: *const u64,
        count: usize,
    ) -> ::core::ffi::c_int {
        (self.sublet_page_announce.as_ref().expect("Expected function, got error."))(
            pager, spans, count,
        )
    }
    pub unsafe fn sublet_page_flush(&self, pager: u64, timeout_ms: u32) -> ::core::ffi::c_int {
        (self.sublet_page_flush.as_ref().expect("Expected function, got error."))(pager, timeout_ms)
    }
    pub unsafe fn sublet_page_set_frames(
        &self,
        pager: u64,
        frames_bytes: u64,
        timeout_ms: u32,
    ) -> ::core::ffi::c_int {
        (self.sublet_page_set_frames.as_ref().expect("Expected function, got error."))(
            pager,
            frames_bytes,
            timeout_ms,
        )
    }
    pub unsafe fn sublet_page_json(
        &self,
        pager: u64,
        buffer: *mut ::core::ffi::c_char,
        size: usize,
    ) -> i64 {
        (self.sublet_page_json.as_ref().expect("Expected function, got error."))(
            pager, buffer, size,
        )
    }
    pub unsafe fn sublet_torch_malloc(
        &self,
        size: isize,
        device: ::core::ffi::c_int,
        stream: *mut ::core::ffi::c_void,
    ) -> *mut ::core::ffi::c_void {
        (self.sublet_torch_malloc.as_ref().expect("Expected function, got error."))(
            size, device, stream,
        )
    }
    pub unsafe fn sublet_torch_free(
        &self,
        ptr: *mut ::core::ffi::c_void,
        size: isize,
        device: ::core::ffi::c_int,
        stream: *mut ::core::ffi::c_void,
    ) {
        (self.sublet_torch_free.as_ref().expect("Expected function, got error."))(
            ptr, size, device, stream,
        )
    }
    pub unsafe fn sublet_stats_json(&self, buffer: *mut ::core::ffi::c_char, size: usize) -> i64 {
        (self.sublet_stats_json.as_ref().expect("Expected function, got error."))(buffer, size)
    }
    pub unsafe fn sublet_tenant_stats_json(
        &self,
        tenant: *const ::core::ffi::c_char,
        buffer: *mut ::core::ffi::c_char,
        size: usize,
    ) -> i64 {
        (self.sublet_tenant_stats_json.as_ref().expect("Expected function, got error."))(
            tenant, buffer, size,
        )
    }
    pub unsafe fn sublet_tenants_json(&self, buffer: *mut ::core::ffi::c_char, size: usize) -> i64 {
        (self.sublet_tenants_json.as_ref().expect("Expected function, got error."))(buffer, size)
    }
    pub unsafe fn ncclPause(&self, comm: *mut ::core::ffi::c_void) -> ::core::ffi::c_int {
        (self.ncclPause.as_ref().expect("Expected function, got error."))(comm)
    }
    pub unsafe fn ncclResume(&self, comm: *mut ::core::ffi::c_void) -> ::core::ffi::c_int {
        (self.ncclResume.as_ref().expect("Expected function, got error."))(comm)
    }
    pub unsafe fn ncclMemStats(&self) -> ::core::ffi::c_int {
        (self.ncclMemStats.as_ref().expect("Expected function, got error."))()
    }
    pub unsafe fn ncclSetGroupID(&self, id: ::core::ffi::c_int) -> ::core::ffi::c_int {
        (self.ncclSetGroupID.as_ref().expect("Expected function, got error."))(id)
    }
    pub unsafe fn ncclGetGroupID(&self, id: *mut ::core::ffi::c_int) -> ::core::ffi::c_int {
        (self.ncclGetGroupID.as_ref().expect("Expected function, got error."))(id)
    }
    pub unsafe fn sublet_set_family(
        &self,
        family: *const ::core::ffi::c_char,
    ) -> ::core::ffi::c_int {
        (self.sublet_set_family.as_ref().expect("Expected function, got error."))(family)
    }
    pub unsafe fn sublet_attach(&self, tenant: *const ::core::ffi::c_char) -> ::core::ffi::c_int {
        (self.sublet_attach.as_ref().expect("Expected function, got error."))(tenant)
    }
    pub unsafe fn sublet_attach_report_json(
        &self,
        buffer: *mut ::core::ffi::c_char,
        size: usize,
    ) -> i64 {
        (self.sublet_attach_report_json.as_ref().expect("Expected function, got error."))(
            buffer, size,
        )
    }
}
