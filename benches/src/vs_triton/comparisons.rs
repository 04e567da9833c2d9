//! The comparisons between the two servers, and their targets.

use serde::Serialize;

use crate::MeasureError;
use crate::spread::Spread;

use super::CaseRounds;
use super::case::{CaseWork, LARGE, LiveChange, SMALL, ServerCase, Side, Wire};
use super::results::{CaseResult, Figure};

/// A comparison of one figure of shadowslice with the same figure of Triton.
#[derive(Debug)]
pub(crate) struct Comparison {
    pub(crate) what: &'static str,
    pub(crate) figure: Figure,
    pub(crate) ours: ServerCase,
    pub(crate) triton: ServerCase,
    pub(crate) target: ComparisonTarget,
}

/// The target of a comparison. Most targets apply to shadowslice's median divided by Triton's
/// median.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ComparisonTarget {
    /// The ratio is at most this value.
    AtMost(f64),
    /// The ratio is below this value.
    Below(f64),
    /// The ratio is at least this value.
    AtLeast(f64),
    /// No request to shadowslice fails in any round. This target does not depend on Triton.
    NoneFails,
    /// The comparison has no target.
    Nothing,
}

/// A comparison with its figures.
#[derive(Debug, Serialize)]
pub(crate) struct ComparisonResult {
    pub(crate) what: &'static str,
    pub(crate) figure: Figure,
    pub(crate) ours: Spread,
    pub(crate) triton: Spread,
    /// The ratio of shadowslice's median to Triton's median, or `None` if Triton's median is zero.
    pub(crate) ratio: Option<f64>,
    /// The target as text. The JSON field keeps its earlier name, `aim`.
    #[serde(rename = "aim")]
    pub(crate) target: String,
    /// True if the target is met, or `None` if the comparison has no target.
    pub(crate) met: Option<bool>,
}

const fn load(side: Side, wire: Wire, bytes: usize, connections: u16) -> ServerCase {
    ServerCase { side, what: CaseWork::Load { wire, bytes, connections } }
}

/// Returns a comparison in which both servers use the same protocol and transport.
const fn same_wire(
    what: &'static str,
    figure: Figure,
    wire: Wire,
    bytes: usize,
    connections: u16,
    target: ComparisonTarget,
) -> Comparison {
    let (ours, triton) =
        (load(Side::Ours, wire, bytes, connections), load(Side::Triton, wire, bytes, connections));
    Comparison { what, figure, ours, triton, target }
}

/// Returns a comparison in which shadowslice uses a Unix socket and Triton uses TCP.
const fn unix_socket(what: &'static str, figure: Figure, bytes: usize, connections: u16) -> Comparison {
    let ours = load(Side::Ours, Wire::HttpUnix, bytes, connections);
    let triton = load(Side::Triton, Wire::HttpTcp, bytes, connections);
    Comparison { what, figure, ours, triton, target: ComparisonTarget::Nothing }
}

const fn during_change(
    what: &'static str,
    figure: Figure,
    ours: LiveChange,
    triton: LiveChange,
    target: ComparisonTarget,
) -> Comparison {
    let (ours, triton) = (CaseWork::Change(ours), CaseWork::Change(triton));
    Comparison {
        what,
        figure,
        ours: ServerCase { side: Side::Ours, what: ours },
        triton: ServerCase { side: Side::Triton, what: triton },
        target,
    }
}

/// All comparisons, in the order of the page. A case runs at the position at which it first occurs
/// in this list.
pub(crate) const COMPARISONS: [Comparison; 20] = {
    use ComparisonTarget::{AtLeast, AtMost, Below, NoneFails, Nothing};
    use Figure::{Failed, LongestMs, P50Us, PerSecond, ServerCpuUs};
    use LiveChange::{Kill, Load, Resize};
    use Wire::{GrpcTcp, HttpTcp};
    [
        same_wire("HTTP over TCP, 1 connection", P50Us, HttpTcp, SMALL, 1, AtMost(0.5)),
        Comparison {
            what: "Triton's gRPC client for Python, ours over a Unix socket, Triton over TCP",
            figure: P50Us,
            ours: ServerCase { side: Side::Ours, what: CaseWork::Python },
            triton: ServerCase { side: Side::Triton, what: CaseWork::Python },
            target: Below(1.0),
        },
        same_wire("HTTP over TCP, 1 connection", ServerCpuUs, HttpTcp, SMALL, 1, AtMost(1.0 / 3.0)),
        same_wire("HTTP over TCP, 128 connections", ServerCpuUs, HttpTcp, SMALL, 128, AtMost(1.0 / 3.0)),
        same_wire("HTTP over TCP, 128 connections", PerSecond, HttpTcp, SMALL, 128, AtLeast(2.5)),
        same_wire("HTTP over TCP, 600 kB, 8 connections", PerSecond, HttpTcp, LARGE, 8, AtLeast(2.0)),
        during_change("live update: load, 8 connections", LongestMs, Load, Load, Nothing),
        during_change("live update: load, 8 connections", Failed, Load, Load, NoneFails),
        during_change("live update: resize, Triton's load, 8 connections", LongestMs, Resize, Load, Nothing),
        during_change("live update: resize, Triton's load, 8 connections", Failed, Resize, Load, NoneFails),
        during_change("killed worker, 8 connections", LongestMs, Kill, Kill, Nothing),
        during_change("killed worker, 8 connections", Failed, Kill, Kill, NoneFails),
        unix_socket("HTTP, ours over a Unix socket, 1 connection", P50Us, SMALL, 1),
        unix_socket("HTTP, ours over a Unix socket, 1 connection", ServerCpuUs, SMALL, 1),
        unix_socket("HTTP, ours over a Unix socket, 128 connections", PerSecond, SMALL, 128),
        unix_socket("HTTP, ours over a Unix socket, 600 kB, 8 connections", PerSecond, LARGE, 8),
        same_wire("HTTP over TCP, 600 kB, 8 connections", ServerCpuUs, HttpTcp, LARGE, 8, Nothing),
        same_wire("gRPC over TCP, 1 connection", P50Us, GrpcTcp, SMALL, 1, Nothing),
        same_wire("gRPC over TCP, 128 connections", ServerCpuUs, GrpcTcp, SMALL, 128, Nothing),
        same_wire("gRPC over TCP, 128 connections", PerSecond, GrpcTcp, SMALL, 128, Nothing),
    ]
};

impl Comparison {
    /// Returns the figures of the comparison, and whether its target is met. Uses only the rounds
    /// that were quiet for both servers. If no round was quiet for both, uses all rounds.
    pub(crate) fn compare(&self, trials: &[CaseRounds]) -> Result<ComparisonResult, MeasureError> {
        let (ours, triton) = (rounds(&self.ours, trials), rounds(&self.triton, trials));
        let both: Vec<_> = ours.iter().zip(triton).collect();
        let quiet = |(ours, triton): &&(&CaseResult, &CaseResult)| ours.is_quiet() && triton.is_quiet();
        let any_quiet = both.iter().any(|pair| quiet(&pair));
        let counted: Vec<_> = both.iter().filter(|pair| !any_quiet || quiet(pair)).collect();
        let ours = spread(self.figure, counted.iter().map(|(ours, _)| *ours))?;
        let triton = spread(self.figure, counted.iter().map(|(_, triton)| *triton))?;
        let ratio = (triton.median > 0.0).then(|| ours.median / triton.median);
        Ok(ComparisonResult {
            what: self.what,
            figure: self.figure,
            ours,
            triton,
            ratio,
            target: self.target.words(),
            met: self.target.met(ours, ratio),
        })
    }
}

fn rounds<'a>(case: &ServerCase, trials: &'a [CaseRounds]) -> &'a [CaseResult] {
    trials.iter().find(|trial| trial.case == *case).map_or(&[], |trial| &trial.rounds)
}

fn spread<'a>(figure: Figure, rounds: impl Iterator<Item = &'a CaseResult>) -> Result<Spread, MeasureError> {
    let values: Vec<f64> = rounds.filter_map(|round| figure.of(round)).collect();
    if values.is_empty() {
        return Err(format!("no round has the figure {}", figure.name()).into());
    }
    Ok(Spread::of(values.into_iter()))
}

impl ComparisonTarget {
    fn words(self) -> String {
        match self {
            Self::AtMost(ratio) => format!("at most {ratio:.2} x"),
            Self::Below(ratio) => format!("below {ratio:.2} x"),
            Self::AtLeast(ratio) => format!("at least {ratio:.2} x"),
            Self::NoneFails => "none".to_owned(),
            Self::Nothing => String::new(),
        }
    }

    /// Returns true if the target is met. Returns `None` for [`Self::Nothing`], or if the target
    /// needs a ratio and `ratio` is `None`.
    pub(crate) fn met(self, ours: Spread, ratio: Option<f64>) -> Option<bool> {
        match self {
            Self::AtMost(most) => Some(ratio? <= most),
            Self::Below(most) => Some(ratio? < most),
            Self::AtLeast(least) => Some(ratio? >= least),
            Self::NoneFails => Some(ours.max == 0.0),
            Self::Nothing => None,
        }
    }
}
