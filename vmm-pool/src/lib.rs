//! Device memory as handles, reservations and mappings, over a real or a simulated CUDA driver.
//!
//! The pool is a layer between the driver and callers of its virtual memory interface. Callers hold [`VirtualHandle`]s,
//! which stay the same while the memory behind them is released and created again. The pool learns no process id, opens
//! no socket, and knows no framework. For the pool, other processes are numbers ([`PeerId`]), which the pool's user
//! chooses.

pub mod asking;
pub mod budget;
mod copies;
mod deferred;
pub mod driver;
mod error;
pub mod gate;
mod ids;
mod journal;
mod ledger;
mod pool;
mod prefault;
mod report;
mod saved;
#[cfg(test)]
mod scaling;
mod store;
pub mod support;
mod transition;
mod waits;

pub use sublet_sync::{slots, sync, threads};

pub use copies::{CopyStreams, Way};
pub use deferred::{Deferred, InUse, Physical};
pub use error::{Describe, PoolError, PoolResult};
pub use ids::{AllocationId, PeerId, VirtualHandle};
pub use journal::{Step, StepLog};
pub use ledger::{
    After, Block, Class, Export, Facts, Holding, HoldingSource, Known, LIBRARY_TAGS, Lease,
    LentTotals, LostImports, Part, References, Selection, Shareable, Sight, Stance, StayReason,
    TagTotals, Tags, TicketWatch, Unfreezable, Whose,
};
pub use pool::{
    AwayByTag, Borrowed, CopyPolicy, Devices, Entered, Front, FrontView, Holdings, HostMemory,
    ImportSource, Inside, Lender, Lenders, Native, Natives, NewMemory, PieceBytes, PlainMemory,
    Pool, Registered, frame_prop,
};
pub use prefault::{BroughtIn, HostStanding};
pub use report::{
    ClassBytes, Contents, CopiedBytes, DeviceReport, KeptBytes, PinnedBytes, PoolReport, SlabTotals,
};
pub use saved::{SavedContents, SavedError, Spilled};
pub use store::{
    CHUNK_BYTES as HOST_CHUNK_BYTES, ContentsFile, Copies, Copying, Each, FILE_ALIGNMENT_BYTES,
    FilePlace, Fill, HeldFile, HostBudget, HostDemand, LookUp, MakeFile, Pinned, SavedPart,
    Schedule, Slot, ToFile, check_file_length,
};
pub use sublet_driver::descriptors::{
    Uninherited, UninheritedFd, close_in_child as close_descriptors_in_child,
};
pub use transition::{
    Activity, Arriving, Aside, Away, ByDevice, Departing, Done, DrainError, Draining, Failed,
    FromOffloaded, FromOpen, Frozen, HomeCopies, ImportRequest, Keeper, Leaving, Left, Moved,
    NotFrozen, NotShut, Origin, Prepared, Quiesced, Restored, Returning, Shut, StillChunk, Undone,
};
pub use waits::{Waited, Waits};
