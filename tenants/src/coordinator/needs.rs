//! What a resume of a tenant would take, and what is free: asked beside pauses and resumes, with no lock of theirs.

use std::collections::BTreeMap;

use super::peers::Everybody;
use super::session::{NEEDS_TIMEOUT, millis};
use super::{Coordinator, CoordinatorError};
use crate::wire::Needs;

/// One GPU of a tenant that is paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceNeed {
    /// What a resume of all its processes takes there, in bytes.
    pub needed_bytes: u64,
    /// What is free there, in bytes.
    pub free_bytes: u64,
}

impl Coordinator {
    /// What a resume in the scope of the options would take on each GPU, by its machine-wide name, as far as the tenant's processes
    /// answer. Takes no lock and changes nothing.
    ///
    /// # Errors
    /// [`CoordinatorError::NoSuchTenant`], [`CoordinatorError::RunDir`].
    pub fn needs(&self) -> Result<BTreeMap<String, DeviceNeed>, CoordinatorError> {
        let Everybody { mut peers, .. } = self.connect_all(&self.dir()?)?;
        let timeout = self.options.timeout.unwrap_or(NEEDS_TIMEOUT);
        let question = Needs { scope: self.options.scope.clone(), timeout_ms: millis(timeout) };
        for index in 0..peers.list.len() {
            // One that does not answer is left for the resume to name.
            let _unasked = peers.ask(index, &question, timeout);
        }
        let mut needs: BTreeMap<String, DeviceNeed> = BTreeMap::new();
        while let Some(answer) = peers.next_answer(self.options.interrupt.as_ref()) {
            for device in answer.to(&question).unwrap_or_default() {
                let need = needs.entry(device.uuid).or_default();
                need.needed_bytes = need.needed_bytes.saturating_add(device.bytes);
                need.free_bytes = need.free_bytes.max(device.free_bytes);
            }
        }
        Ok(needs)
    }
}
