//! Coming for memory of others, and why that was refused.

use sublet_cuda_driver::{Accessors, ipc};
use sublet_tests::{Outcome, Trouble};
use tenants::member::ImportError;
use tenants::ticket::Ticket;
use tenants::wire::FailureKind;
use vmm_pool::driver::sim::GRANULARITY_BYTES;
use vmm_pool::driver::{DeviceOrdinal, VaRange};
use vmm_pool::{Contents, PoolError, VirtualHandle};

use super::super::calls::{NotMapped, fired, is_explained, judged, try_map};
use super::{Exchange, LIBRARY, Origin, Piece};
use crate::orders::{Offer, Paper, Taken, TakenHow, Why};

impl Exchange {
    /// Comes for what is offered. The process that offered it judges a refusal.
    pub(in super::super) fn accept(&self, offers: Vec<Offer>) -> Outcome<Vec<Taken>> {
        let mut taken = Vec::new();
        for offer in offers {
            let number = offer.number;
            let how = match &offer.paper {
                Paper::Ticket(words) => self.redeem(&offer, &Ticket::decode(words)?)?,
                Paper::Handle(words) => self.open(&offer, words)?,
            };
            taken.push(Taken { offer: number, how });
        }
        Ok(taken)
    }

    fn redeem(&self, offer: &Offer, ticket: &Ticket) -> Outcome<TakenHow> {
        let entered = self.member.pool().enter();
        let before = fired(&self.member);
        let handle = match self.member.sharing().redeem_ticket(&entered, ticket, LIBRARY) {
            Ok(handle) => handle,
            Err(error) => return Ok(self.refusal(before, &error)),
        };
        let reader = self.model().random.choice(&self.devices).copied();
        let readers: Vec<DeviceOrdinal> = reader.into_iter().collect();
        let before = fired(&self.member);
        let give_back =
            || judged(&self.member, before, self.member.pool().enter_giving_up().release(handle));
        let place = match try_map(&self.member, handle, offer.units, &readers) {
            Ok(Some(place)) => place,
            Ok(None) => {
                give_back()?;
                return Ok(TakenHow::Dropped);
            }
            Err(NotMapped::Refused(error)) => {
                give_back()?;
                let why = why_of_pool(&error);
                return Ok(TakenHow::NotMapped { why, text: error.to_string() });
            }
            Err(NotMapped::Trouble(trouble)) => return Err(trouble),
        };
        self.model().enter(imported(offer, Some(handle), place, readers, 0));
        Ok(TakenHow::Held)
    }

    fn open(&self, offer: &Offer, words: &[u8]) -> Outcome<TakenHow> {
        let handle: [u8; ipc::HANDLE_BYTES] = words.try_into()?;
        let reader = {
            let mut model = self.model();
            self.devices[model.random.usize(..self.devices.len())]
        };
        let before = fired(&self.member);
        // It takes a pass of its own, which it steps aside with.
        let opened = ipc::try_open(&self.member, &Accessors::default(), &handle, reader, LIBRARY);
        let opened = opened.ok_or_else(|| Trouble::new("a handle that is not known as ours"))?;
        let start = match opened {
            Ok(start) => start,
            Err(error) => return Ok(self.refusal(before, &error)),
        };
        let mut model = self.model();
        let again = model.pieces.iter_mut().find_map(|piece| {
            let is_same = piece.place.is_some_and(|place| place.start == start);
            match &mut piece.origin {
                Origin::Imported { opens, .. } if is_same && piece.id == offer.id => Some(opens),
                Origin::Imported { .. } | Origin::Own | Origin::Block => None,
            }
        });
        if let Some(opens) = again {
            *opens += 1;
            return Ok(TakenHow::Held);
        }
        let place = VaRange::new(start, offer.units * GRANULARITY_BYTES);
        model.enter(imported(offer, None, place, vec![reader], 1));
        Ok(TakenHow::Held)
    }

    fn refusal(&self, before: u64, error: &ImportError) -> TakenHow {
        let is_explained = is_explained(&self.member, before);
        TakenHow::Refused { why: why(error), text: error.to_string(), is_explained }
    }

    /// A ticket is redeemed by its own process, so that it holds nothing any more.
    pub(in super::super) fn settle(&self, words: &[u8]) -> Outcome {
        let entered = self.member.pool().enter();
        // It may have been redeemed by one that died since.
        if let Ok(handle) =
            self.member.sharing().redeem_ticket(&entered, &Ticket::decode(words)?, LIBRARY)
        {
            let before = fired(&self.member);
            judged(&self.member, before, self.member.pool().enter_giving_up().release(handle))?;
        }
        Ok(())
    }
}

/// Why somebody who came for memory did not get it.
fn why(error: &ImportError) -> Why {
    match error {
        ImportError::Pool(error) => why_of_pool(error),
        // In the words of its own process.
        ImportError::Refused(failure) => match failure.kind {
            FailureKind::WrongState => Why::Away,
            FailureKind::Unknown
            | FailureKind::InCapture
            | FailureKind::CutNotReached
            | FailureKind::DrainTimeout
            | FailureKind::OutOfHostMemory
            | FailureKind::OutOfDeviceMemory { .. }
            | FailureKind::DoesNotFit { .. }
            | FailureKind::PeerGone
            | FailureKind::Nameless
            | FailureKind::NoConsent
            | FailureKind::CalledOff
            | FailureKind::NotNow
            | FailureKind::Shared
            | FailureKind::Lent
            | FailureKind::LenderAway
            | FailureKind::Driver
            | FailureKind::Faulted => Why::Else,
        },
        ImportError::Stale { .. } => Why::Freed,
        ImportError::Owner { .. } | ImportError::OwnerEnded { .. } => Why::OwnerSilent,
        ImportError::OtherTenant { .. }
        | ImportError::NoLender { .. }
        | ImportError::LenderAway { .. }
        | ImportError::OtherDevice { .. }
        | ImportError::NoTicket { .. }
        | ImportError::Missing { .. }
        | ImportError::Miscounted { .. }
        | ImportError::NotMemory { .. }
        | _ => Why::Else,
    }
}

fn why_of_pool(error: &PoolError) -> Why {
    if matches!(error, PoolError::Offloaded { .. }) { Why::Away } else { Why::Else }
}

fn imported(
    offer: &Offer,
    handle: Option<VirtualHandle>,
    place: VaRange,
    readers: Vec<DeviceOrdinal>,
    opens: u32,
) -> Piece {
    Piece {
        id: offer.id,
        origin: Origin::Imported { owner: offer.owner, is_orphan: false, is_lost: false, opens },
        handle,
        place: Some(place),
        readers,
        units: offer.units,
        device: DeviceOrdinal(offer.device),
        contents: if offer.is_kept { Contents::Keep } else { Contents::Discard },
        tag: offer.tag.clone(),
        pattern: offer.pattern,
    }
}
