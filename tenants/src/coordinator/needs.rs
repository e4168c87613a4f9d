//! What a resume of a tenant would take, and what is free; and whether its devices have anything left to do: asked outside of pauses and resumes, with no lock of theirs.

use std::collections::BTreeMap;

use super::peers::Everybody;
use super::session::{NEEDS_TIMEOUT, millis};
use super::{Coordinator, CoordinatorError};
use crate::wire::{Idleness, LookIdle, Needs};

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
        self.ask_needs(false)
    }

    /// As [`Coordinator::needs`], with what is free on all other GPUs that the tenant's processes use.
    ///
    /// # Errors
    /// As [`Coordinator::needs`].
    pub fn needs_and_free(&self) -> Result<BTreeMap<String, DeviceNeed>, CoordinatorError> {
        self.ask_needs(true)
    }

    fn ask_needs(
        &self,
        all_devices: bool,
    ) -> Result<BTreeMap<String, DeviceNeed>, CoordinatorError> {
        let Everybody { mut peers, .. } = self.connect_all(&self.dir()?)?;
        let timeout = self.options.timeout.unwrap_or(NEEDS_TIMEOUT);
        let question =
            Needs { scope: self.options.scope.clone(), timeout_ms: millis(timeout), all_devices };
        for index in 0..peers.list.len() {
            // One that does not answer is left for the resume to name.
            let _unasked = peers.ask(index, &question, timeout);
        }
        let mut needs: BTreeMap<String, DeviceNeed> = BTreeMap::new();
        while let Some(answer) = peers.next_answer(self.options.interrupt.as_ref()) {
            for device in answer.to(&question).unwrap_or_default().devices {
                let need = needs.entry(device.uuid).or_default();
                need.needed_bytes = need.needed_bytes.saturating_add(device.bytes);
                need.free_bytes = need.free_bytes.max(device.free_bytes);
            }
        }
        Ok(needs)
    }

    /// Of each process that answers, whether its devices have anything left to do, where it has launched nothing for `quiet_us`. Holds calls of such a
    /// process up for some milliseconds; takes no lock.
    ///
    /// # Errors
    /// [`CoordinatorError::NoSuchTenant`], [`CoordinatorError::RunDir`].
    pub fn look_idle(&self, quiet_us: u64) -> Result<Vec<Idleness>, CoordinatorError> {
        let Everybody { mut peers, .. } = self.connect_all(&self.dir()?)?;
        let question = LookIdle { quiet_us };
        for index in 0..peers.list.len() {
            let _unasked = peers.ask(index, &question, self.options.contact_timeout);
        }
        let mut all = Vec::new();
        while let Some(answer) = peers.next_answer(self.options.interrupt.as_ref()) {
            all.extend(answer.to(&question).ok());
        }
        Ok(all)
    }
}
