//! NCCL EP's functions that count launches. They convert C arguments for `sublet_nccl::collectives`.

#![expect(unsafe_code, reason = "exports functions under NCCL EP's names and calls NCCL EP")]
#![expect(non_snake_case, reason = "named as NCCL EP names them")]

use std::ffi::c_int;

use sublet_nccl::collectives::NcclResult;

use super::{Function, NCCL_EP as NCCL};
use crate::nccl::calls::{call_nccl, counted, function};
use crate::runtime;
use sublet_interpose::Pointer;

function! {
    ncclEpCreateGroup(place: Pointer, communicator: Pointer, settings: Pointer)
        by member |all, here, call| {
            let place = place.expose_provenance();
            all.make_expert_group(here, communicator.expose_provenance(), place, call)
        }
}
function! {
    ncclEpGroupDestroy(group: Pointer) by member |all, _here, call| {
        all.end_expert_group(group.expose_provenance(), call)
    }
}
function! {
    ncclEpInitHandle(
        place: Pointer, group: Pointer, layout: c_int, settings: Pointer, choices: c_int, memory: Pointer
    ) by member |all, here, call| {
        let place = place.expose_provenance();
        all.make_expert_handle(here, group.expose_provenance(), place, call)
    }
}
function! {
    ncclEpCreateHandle(
        place: Pointer, group: Pointer, layout: c_int, choices: Pointer, information: Pointer,
        settings: Pointer, stream: Pointer
    ) by member |all, here, call| {
        let place = place.expose_provenance();
        all.make_expert_handle(here, group.expose_provenance(), place, call)
    }
}
function! {
    ncclEpHandleDestroy(handle: Pointer) by member |all, _here, call| {
        all.end_expert_handle(handle.expose_provenance(), call)
    }
}
function! {
    ncclEpDispatch(
        handle: Pointer, inputs: Pointer, outputs: Pointer, information: Pointer, settings: Pointer,
        stream: Pointer
    ) by member |all, here, call| {
        let stream = stream.expose_provenance();
        all.exchange(here, "ncclEpDispatch", handle.expose_provenance(), stream, call)
    }
}
function! {
    ncclEpCombine(
        handle: Pointer, inputs: Pointer, outputs: Pointer, settings: Pointer, stream: Pointer
    ) by member |all, here, call| {
        let stream = stream.expose_provenance();
        all.exchange(here, "ncclEpCombine", handle.expose_provenance(), stream, call)
    }
}
