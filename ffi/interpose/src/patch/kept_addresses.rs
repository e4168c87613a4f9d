//! The provider's functions that a library looked up before the attach, and keeps in its own data.
//!
//! A CUDA runtime, shared or linked into a library, asks for hundreds of the driver's functions at its first
//! use and keeps their addresses in static data (`libcudart` 12.9 and 13.5: in `.bss`; NCCL and `PyTorch`
//! likewise). A word of a library's data that equals the entry of a hooked function of the provider's is such
//! an address, and is exchanged for ours. What is kept on the heap is not found.

use std::sync::atomic::Ordering;

use super::object::Object;
use super::protections::Protections;
use crate::provider::Exchange;

/// Exchanges the addresses that `object` keeps. Returns how many.
pub(super) fn exchange(object: &Object<'_>, known: &Exchange, protections: &Protections) -> usize {
    const STEP: usize = size_of::<usize>();
    let Some(span) = known.span() else {
        return 0;
    };
    let mut exchanged = 0;
    let parts = object.data().flat_map(|part| protections.writable_in(part));
    for part in parts {
        for address in (part.start.next_multiple_of(STEP)..part.end).step_by(STEP) {
            let Some(word) = object.word(address) else {
                continue;
            };
            let value = word.load(Ordering::Relaxed);
            if !span.contains(&value) {
                continue;
            }
            if let Some(ours) = known.ours_for(value) {
                let swapped =
                    word.compare_exchange(value, ours, Ordering::AcqRel, Ordering::Relaxed);
                exchanged += usize::from(swapped.is_ok());
            }
        }
    }
    exchanged
}
