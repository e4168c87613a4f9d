//! The door for a crate that takes the contexts of processes off the devices behind a pause, and brings them back before a resume. It has the
//! processes, the orders and the account of a [`Session`] for that. Without it deep pauses are refused, and so are the resumes of their tenants.

use std::fmt;

use super::report::MemberFailure;
use super::session::Session;

/// The way to the contexts of a tenant's processes. From any thread; each call blocks for a bounded time.
pub trait Contexts: fmt::Debug + Send + Sync {
    /// Fails, with why, where a deep pause would not come to its end. Nothing has moved yet.
    ///
    /// # Errors
    /// For people.
    fn check(&self, leg: &Session<'_>) -> Result<(), String>;

    /// The pause of all members that are not lost is complete: takes the contexts of all. What failed is in the report, and all are paused.
    fn take(&self, leg: &mut Session<'_>);

    /// All members stand paused: takes the contexts that are still there, as [`Contexts::take`]. Returns false when there are none.
    fn take_rest(&self, leg: &mut Session<'_>) -> bool;

    /// Brings the contexts of members back that stand `deep`, for a resume, and adds what came of it to the report.
    ///
    /// # Errors
    /// Those that lack them still. All stand as before, as far as the driver does its part.
    fn bring_back(&self, leg: &mut Session<'_>, deep: &[usize]) -> Result<(), Vec<MemberFailure>>;

    /// A resume came to nothing: takes those again that it has brought back, by its report.
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

    /// A way to the contexts of processes that have an id here.
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
