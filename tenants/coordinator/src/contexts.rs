//! The interface for a crate that takes the contexts of processes off the devices after a pause, and restores them before a
//! resume. It works on the processes, the orders and the account of a [`Session`]. Without such a crate deep pauses are
//! refused, and so are the resumes of their tenants.

use std::fmt;

use super::report::MemberFailure;
use super::session::Session;

/// Access to the contexts of a tenant's processes. From any thread; each call blocks for a bounded time.
pub trait Contexts: fmt::Debug + Send + Sync {
    /// Fails, with the reason, if a deep pause could not be completed. Nothing has moved yet.
    ///
    /// # Errors
    /// The reason, as text for people.
    fn check(&self, leg: &Session<'_>) -> Result<(), String>;

    /// Takes the contexts of all members off the devices, once the pause of all members that are not lost is complete. Failures
    /// are in the report, and all members are paused.
    fn take(&self, leg: &mut Session<'_>);

    /// Takes the contexts that are still on the devices, as [`Contexts::take`], while all members are paused. Returns false if
    /// there are none.
    fn take_rest(&self, leg: &mut Session<'_>) -> bool;

    /// Restores the contexts of the members `deep` for a resume, and adds the outcome to the report.
    ///
    /// # Errors
    /// The members that still lack contexts. All members are as before, unless the driver fails.
    fn bring_back(&self, leg: &mut Session<'_>, deep: &[usize]) -> Result<(), Vec<MemberFailure>>;

    /// Takes contexts off the devices again after a failed resume: those that the resume restored, by its report.
    fn take_again(&self, leg: &mut Session<'_>);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use sublet_protocol::wire::{Action, MemberState};
    use sublet_stage::fake::{World, tenant};
    use sublet_stage::script::Script;

    use super::*;
    use crate::{Coordinator, Event, Options};

    /// Access to the contexts of processes that have an id here.
    #[derive(Debug)]
    struct OfThoseHere;

    impl Contexts for OfThoseHere {
        fn check(&self, leg: &Session<'_>) -> Result<(), String> {
            let peers = &leg.cast.peers;
            let unseen = peers.all().into_iter().find(|index| peers.pid_here(*index).is_none());
            unseen.map_or(Ok(()), |index| Err(format!("{} is out of sight", peers.who(index))))
        }

        fn take(&self, _: &mut Session<'_>) {}

        fn take_rest(&self, _: &mut Session<'_>) -> bool {
            false
        }

        fn bring_back(&self, _: &mut Session<'_>, _: &[usize]) -> Result<(), Vec<MemberFailure>> {
            Ok(())
        }

        fn take_again(&self, _: &mut Session<'_>) {}
    }

    #[test]
    fn a_process_of_another_pid_namespace_has_no_id_here_whatever_id_it_says_that_it_has() {
        let world = World::of(&[Script::new(MemberState::Active)]);
        let contexts: Option<Arc<dyn Contexts>> = Some(Arc::new(OfThoseHere));
        let options = Options { is_deep: true, contexts, ..Options::default() };
        let coordinator = Coordinator::new(world.run_dir.clone(), tenant("train"), options);
        let held = coordinator.hold(Action::Pause).unwrap();
        let mut progress = |_: Event<'_>| {};
        let mut session =
            Session::open(&held, &coordinator.options, Action::Pause, &mut progress).unwrap();
        assert!(session.check_contexts().is_ok());
        assert!(session.cast.peers.who(0).pid.is_some(), "its own id, for reports");
        session.cast.peers.move_out_of_sight(0);
        let error = session.check_contexts().unwrap_err();
        assert!(error.to_string().contains("is out of sight"), "{error}");
    }
}
