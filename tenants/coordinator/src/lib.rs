//! Pauses and resumes a tenant: leads all its processes through the phases together.
//!
//! There is no daemon. The process that wants a tenant paused (the command, one of its own processes, another tenant's policy)
//! is its coordinator for that time, under a lock. All members finish a phase before any member starts the next. The point of
//! no return is [`Release`](sublet_protocol::wire::Phase::Release) in a pause, and
//! [`Activate`](sublet_protocol::wire::Phase::Activate) in a resume. A failure before it is undone in all members. After it the
//! remaining members finish, and lost members are reported.
//!
//! A step is sent to all members, then one poll waits for all answers. No thread is started. Every call blocks, for a bounded time.

#![forbid(unsafe_code)]

mod agreement;
mod cast;
mod contexts;
mod conversation;
mod coordinator;
mod cutting;
mod figures;
mod guards;
mod interrupt;
mod lending;
mod needs;
mod options;
mod peers;
mod report;
mod round;
mod session;
mod stepping;
mod trouble;

pub use agreement::moving_time;
pub use cast::{Cast, Everybody, OnFailure, StepResult};
pub use contexts::Contexts;
pub use conversation::{Inquiry, Next, Wait};
pub use coordinator::{Coordinator, Held};
pub use figures::{DeviceShortage, GpuBudget, Holder, ProcessBytes, end_some};
pub use guards::Tries;
pub use interrupt::Interrupt;
pub use needs::{DeviceNeed, Holdings, by_process, needs, short_devices};
pub use options::{LentMemory, LostImports, MakesRoom, Meanwhile, Options, TakesPart};
pub use peers::{Answer, Peers};
pub use report::{
    CutSummary, DeviceTotal, DrainSummary, Event, MemberFailure, MemberPhase, Outcome,
    PhaseSummary, Question, Report, StageSummary, Step, TenantStats, Who, staying,
};
pub use round::{Round, refuse_standing};
pub use session::{Session, attempt};
pub use trouble::{Stop, Trouble};
