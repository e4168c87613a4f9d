//! What a resume of a tenant takes, and what is free; and what a pause gives. A coordinator that leads asks its members; any other asks a
//! tenant with no lock, and also whether its devices have anything left to do.

use std::collections::BTreeMap;
use std::time::Duration;

use vmm_pool::ClassBytes;

use super::peers::Everybody;
use super::report::{MemberFailure, Report, Step};
use super::session::{Plan, Session};
use super::shortage::short_devices;
use super::steps::{OnFailure, StepResult};
use super::{Coordinator, CoordinatorError};
use crate::scope::Scope;
use crate::time::millis;
use crate::wire::{DeviceDelta, Failure, FailureKind, Idleness, LookIdle, Needed, Needs, Stats};

/// How long members may take to say what a resume needs, when nothing else is said.
pub(super) const NEEDS_TIMEOUT: Duration = Duration::from_mins(1);

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
    /// answer; with `all_devices` also what is free on all other GPUs that they use. Takes no lock and changes nothing.
    ///
    /// # Errors
    /// [`CoordinatorError::NoSuchTenant`], [`CoordinatorError::RunDir`].
    pub fn needs(
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

impl Session<'_> {
    /// Refuses when the devices cannot hold the members.
    pub(super) fn look(
        &mut self,
        plan: &Plan,
        members: &[usize],
    ) -> Result<(), Vec<MemberFailure>> {
        let short = short_devices(&self.needs(members));
        let next = plan.prepare.first();
        let (Some(shortage), Some(&index), Some(&next)) = (short.first(), members.first(), next)
        else {
            return Ok(());
        };
        let missing_bytes = shortage.missing_bytes();
        let kind = FailureKind::OutOfDeviceMemory { missing_bytes };
        let failure = Failure { kind, message: "its tenant does not fit".to_owned() };
        let step = Step::Phase(next);
        Err(vec![MemberFailure { who: self.peers.list[index].who, step, failure }])
    }

    /// What `members` need to be resumed and what is free, as far as they answer.
    pub(super) fn needs(&mut self, members: &[usize]) -> Vec<DeviceDelta> {
        self.ask_needs(members).done.into_iter().flat_map(|(_, needed)| needed.devices).collect()
    }

    fn ask_needs(&mut self, members: &[usize]) -> StepResult<Needed> {
        let timeout = self.options.timeout.unwrap_or(NEEDS_TIMEOUT);
        let question =
            Needs { scope: self.scope.clone(), timeout_ms: millis(timeout), all_devices: false };
        self.step(&question, members, timeout, OnFailure::WaitForAll)
    }

    /// What each of `members` needs to be resumed, in their order.
    pub(super) fn needs_of_each(
        &mut self,
        members: &[usize],
    ) -> Result<Vec<Needed>, Vec<MemberFailure>> {
        let mut result = self.ask_needs(members);
        if !result.failures.is_empty() {
            return Err(result.into_failures());
        }
        result.done.sort_by_key(|(index, _)| members.iter().position(|member| member == index));
        Ok(result.done.into_iter().map(|(_, needed)| needed).collect())
    }

    /// What a pause of `members` would give back about now, by device, as far as they answer.
    pub(super) fn resident_bytes(&mut self, members: &[usize]) -> BTreeMap<String, u64> {
        let timeout = self.options.contact_timeout;
        let result = self.step(&Stats, members, timeout, OnFailure::WaitForAll);
        let leaves = |class: &&ClassBytes| match &self.scope {
            Scope::Whole => true,
            Scope::Tags { tags, .. } => tags.to_pause().has(&class.tag),
        };
        let mut bytes = BTreeMap::new();
        for device in result.done.iter().flat_map(|(_, stats)| &stats.pool.devices) {
            let classes = device.classes.iter().filter(leaves);
            let leaving =
                classes.map(|class| class.resident_bytes.saturating_sub(class.pinned_bytes));
            *bytes.entry(device.uuid.clone()).or_insert(0_u64) += leaving.sum::<u64>();
        }
        bytes
    }

    /// What each of `members` said of its devices in the last phase of `report`, in their order.
    pub(super) fn last_said(&self, report: &Report, members: &[usize]) -> Vec<Vec<DeviceDelta>> {
        let said = report.phases.last().map_or(&[][..], |phase| &phase.members);
        let of = |index: &usize| {
            let who = self.peers.list[*index].who;
            let found = said.iter().find(|member| member.who == who);
            found.map(|member| member.report.devices.clone()).unwrap_or_default()
        };
        members.iter().map(of).collect()
    }
}
