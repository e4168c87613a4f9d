//! What the coordinator asks, and which of its steps each question is.

use super::report::Step;
use crate::wire::{
    Ask, AskLent, AwaitConsent, Count, Drain, GiveUp, Hello, Hold, HostStep, LookIdle, Needs,
    Phase, SaveStep, SpillStep, Stats, StepOn, TakePhase,
};

/// A question of the coordinator's, which is one of its steps.
pub(super) trait Question: Ask {
    /// What people read of it.
    fn step(&self) -> Step;
}

macro_rules! questions {
    ($($question:ident is $step:expr;)*) => {$(
        impl Question for $question {
            fn step(&self) -> Step {
                let step: fn(&Self) -> Step = $step;
                step(self)
            }
        }
    )*};
}

questions! {
    Hello is |_| Step::Hello;
    Stats is |_| Step::Stats;
    LookIdle is |_| Step::Stats;
    Count is |_| Step::Count;
    AwaitConsent is |asked| Step::Consent(asked.action);
    GiveUp is |told| Step::Consent(told.action);
    Needs is |_| Step::Needs;
    Hold is |_| Step::Cut;
    StepOn is |_| Step::Drain;
    SaveStep is |_| Step::Save;
    HostStep is |_| Step::Host;
    SpillStep is |_| Step::Spill;
    AskLent is |_| Step::Lending;
    Drain is |_| Step::Phase(Phase::Drain);
    TakePhase is |asked| Step::Phase(asked.order.phase());
}
