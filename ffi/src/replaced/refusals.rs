//! Copies, fills and waits for values whose memory is paused by tag.
//!
//! The driver would find no mapping there, and such a call would destroy the context of the process. So the call is refused
//! before the driver gets it, with a code that the CUDA runtime returns once and does not keep. Kernels are not checked.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use tenants::scope::{Scope, TagNames};
use vmm_pool::AwayByTag;
use vmm_pool::driver::DriverCode;

use super::graph::capture_of;
use crate::look::{self, Names};
use crate::runtime::Member;

/// Tags for which a note was made: one note for each is enough. A leaf.
static NOTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Returns the memory paused by tag that a call names for this stream. It stays paused while the caller is inside the gate.
pub(crate) fn away_in(member: &Member, names: Names<'_>, stream: usize) -> Option<AwayByTag> {
    let mut found = None;
    look::each_range(names, |range| {
        found = found.take().or_else(|| member.pool().holdings().away_by_tag(range));
    });
    // A captured call touches no memory yet.
    found.filter(|_| capture_of(stream).is_none())
}

/// Returns the code for the call `symbol`, which names the paused memory `away`. The first refusal of a tag is noted, outside of
/// the gate.
#[cold]
pub(crate) fn refuse(member: &Member, symbol: &'static str, away: &AwayByTag) -> c_int {
    let AwayByTag { tag, range, device } = away;
    let is_new = NOTED.lock().unwrap_or_else(PoisonError::into_inner).insert(tag.clone());
    if is_new {
        let tags = TagNames::Named([tag.clone()].into());
        let resume = Scope::Tags { tags, owner: None }.resume_command(member.presence().tenant());
        let device = device.map_or_else(String::new, |device| format!(" of {device}"));
        // The process runs without the memory of a paused tag, and a copy, fill or wait named this memory. The driver
        // never saw the call, so the context lives. The log has one such line for each tag. Resume the tag with the
        // command in the message.
        member.notes().add(format!(
            "{symbol} was refused with CUDA_ERROR_NOT_PERMITTED and did nothing: it names memory at {}, {} bytes{device} \
             with tag '{tag}', which is paused. Bring it back first: `{resume}`",
            range.start, range.size_bytes
        ));
    }
    DriverCode::NOT_PERMITTED.0
}
