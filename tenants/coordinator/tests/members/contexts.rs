//! Tests of the interface for the crate that takes contexts: the calls, and their times (`tenants/deep` has the crate's own
//! tests).

use std::sync::Mutex;

use super::*;

/// An implementation of [`Contexts`] that records its calls.
#[derive(Debug, Default)]
struct Asked(Mutex<Vec<&'static str>>);

impl Asked {
    fn note(&self, call: &'static str) {
        self.0.lock().unwrap().push(call);
    }

    fn take_all(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Contexts for Asked {
    fn check(&self, _: &Session<'_>) -> Result<(), String> {
        self.note("check");
        Ok(())
    }

    fn take(&self, _: &mut Session<'_>) {
        self.note("take");
    }

    fn take_rest(&self, _: &mut Session<'_>) -> bool {
        self.note("take_rest");
        false
    }

    fn bring_back(&self, _: &mut Session<'_>, _: &[usize]) -> Result<(), Vec<MemberFailure>> {
        self.note("bring_back");
        Ok(())
    }

    fn take_again(&self, _: &mut Session<'_>) {
        self.note("take_again");
    }
}

fn coordinator(world: &World, asked: &Arc<Asked>, is_deep: bool) -> Coordinator {
    let contexts = Some(Arc::clone(asked) as Arc<dyn Contexts>);
    Coordinator::new(
        world.run_dir.clone(),
        tenant("train"),
        Options { is_deep, contexts, ..options() },
    )
}

#[test]
fn each_moment_of_a_deep_pause_is_asked_for_once_and_none_of_a_plain_one() {
    let (world, asked) = (World::of(&[active()]), Arc::<Asked>::default());
    let mut plain = coordinator(&world, &asked, false);
    report(plain.pause(&mut quiet).unwrap());
    report(plain.resume(&mut quiet).unwrap());
    assert_eq!(asked.take_all(), [""; 0]);
    let mut deep = coordinator(&world, &asked, true);
    report(deep.pause(&mut quiet).unwrap());
    assert_eq!(asked.take_all(), ["check", "take"]);
    let again = deep.pause(&mut quiet).unwrap();
    assert_eq!(again, Outcome::AlreadyPaused { stays: Vec::new() });
    assert_eq!(asked.take_all(), ["check", "take_rest"]);
}

#[test]
fn a_resume_brings_contexts_back_first_and_takes_them_again_when_it_comes_to_nothing() {
    let full = FailureKind::OutOfDeviceMemory { missing_bytes: 7 };
    let deep = Script::new(MemberState::Deep);
    for (script, expected) in [
        (deep.clone(), &["bring_back"][..]),
        (deep.with(Phase::Create, Fault::Fail(full)), &["bring_back", "take_again"]),
    ] {
        let (world, asked) = (World::of(&[script]), Arc::<Asked>::default());
        drop(coordinator(&world, &asked, false).resume(&mut quiet));
        assert_eq!(asked.take_all(), expected);
    }
}
