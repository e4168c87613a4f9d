//! The functions of `include/sublet.h`. The header is the source of truth.
//!
//! * [`pausing`]: commands: pausing and resuming, whole or by tag; getting the GPUs from others, and turns on them.
//! * [`regions`]: the tags of memory.
//! * [`contents`]: contents while they are offloaded, and contents that the application does not need.
//! * [`paging`]: addresses whose contents are on the device for a part of the time.
//! * [`stats`]: the memory that processes hold, and how much a tenant may hold, as JSON.
//! * [`attach`]: the attach to Sublet without `LD_PRELOAD`.
//! * [`amem`]: the `ncclPause` family.

pub mod amem;
pub mod attach;
pub mod contents;
pub mod paging;
pub mod pausing;
pub mod regions;
pub mod stats;

use crate::{bindings, last_call, pluggable};

/// Fails to compile when a function here and its declaration in the header differ.
macro_rules! agrees {
    ($($module:ident: $($name:ident)*;)*) => {
        $($(const _: bindings::$name = $module::$name;)*)*
    };
}

agrees! {
    stats: sublet_version sublet_stats_json sublet_tenant_stats_json sublet_tenants_json
        sublet_set_budget sublet_budget_json;
    last_call: sublet_last_error sublet_last_error_json sublet_last_report_json;
    pausing: sublet_command sublet_pause_tenant sublet_resume_tenant sublet_swap_tenants sublet_swap_tags
        sublet_pause_tags sublet_resume_tags sublet_resume_in_turn sublet_prepare_tenant
        sublet_is_paused sublet_tag_is_paused sublet_changes sublet_switch_tenant sublet_turn_begin
        sublet_turn_end;
    regions: sublet_region_begin sublet_region_begin_on sublet_region_begin_none sublet_region_end
        sublet_region_begin_all_threads sublet_region_end_all_threads;
    contents: sublet_host_copy sublet_set_file_dir sublet_host_copy_out sublet_set_unused_source
        sublet_unused;
    paging: sublet_page_open sublet_page_close sublet_page_region sublet_page_alloc sublet_page_free
        sublet_page_acquire sublet_page_release sublet_page_announce sublet_page_flush
        sublet_page_set_frames sublet_page_plan_json sublet_page_json;
    pluggable: sublet_torch_malloc sublet_torch_free;
    attach: sublet_set_family sublet_attach sublet_attach_report_json;
    amem: ncclPause ncclResume ncclMemStats ncclSetGroupID ncclGetGroupID;
}
