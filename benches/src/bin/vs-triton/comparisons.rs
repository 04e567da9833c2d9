//! The comparisons and their aims.

use serde::Serialize;
use shadowslice_benches::MeasureError;
use shadowslice_benches::spread::Spread;

use crate::CaseRounds;
use crate::case::{CaseWork, LARGE, LiveChange, SMALL, ServerCase, Side, Wire};
use crate::results::{CaseResult, Figure};

/// One comparison.
#[derive(Debug)]
pub(crate) struct Comparison {
    pub(crate) what: &'static str,
    pub(crate) figure: Figure,
    pub(crate) ours: ServerCase,
    pub(crate) triton: ServerCase,
    pub(crate) aim: ComparisonTarget,
}

/// The aim: for this server's median over Triton's, or for this server's median alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ComparisonTarget {
    AtMost(f64),
    Below(f64),
    AtLeast(f64),
    /// Not one request fails, in any round.
    NoneFails,
    /// Shown without an aim.
    Nothing,
}

/// A row with its figures.
#[derive(Debug, Serialize)]
pub(crate) struct ComparisonResult {
    pub(crate) what: &'static str,
    pub(crate) figure: Figure,
    pub(crate) ours: Spread,
    pub(crate) triton: Spread,
    /// This server's median over Triton's; `None` if Triton's is zero.
    pub(crate) ratio: Option<f64>,
    pub(crate) aim: String,
    /// `None` for a row without an aim.
    pub(crate) met: Option<bool>,
}

const fn load(side: Side, wire: Wire, bytes: usize, connections: u16) -> ServerCase {
    ServerCase { side, what: CaseWork::Load { wire, bytes, connections } }
}

/// Both over the same wire.
const fn alike(
    what: &'static str,
    figure: Figure,
    wire: Wire,
    bytes: usize,
    connections: u16,
    aim: ComparisonTarget,
) -> Comparison {
    let (ours, triton) =
        (load(Side::Ours, wire, bytes, connections), load(Side::Triton, wire, bytes, connections));
    Comparison { what, figure, ours, triton, aim }
}

/// Ours over a Unix socket, Triton over TCP.
const fn local(what: &'static str, figure: Figure, bytes: usize, connections: u16) -> Comparison {
    let ours = load(Side::Ours, Wire::HttpUnix, bytes, connections);
    let triton = load(Side::Triton, Wire::HttpTcp, bytes, connections);
    Comparison { what, figure, ours, triton, aim: ComparisonTarget::Nothing }
}

const fn changed(
    what: &'static str,
    figure: Figure,
    ours: LiveChange,
    triton: LiveChange,
    aim: ComparisonTarget,
) -> Comparison {
    let (ours, triton) = (CaseWork::Change(ours), CaseWork::Change(triton));
    Comparison {
        what,
        figure,
        ours: ServerCase { side: Side::Ours, what: ours },
        triton: ServerCase { side: Side::Triton, what: triton },
        aim,
    }
}

/// All comparisons, as the page shows them; cases run in the order in which they are first named here.
pub(crate) const COMPARISONS: [Comparison; 20] = {
    use ComparisonTarget::{AtLeast, AtMost, Below, NoneFails, Nothing};
    use Figure::{Failed, LongestMs, P50Us, PerSecond, ServerCpuUs};
    use LiveChange::{Kill, Load, Resize};
    use Wire::{GrpcTcp, HttpTcp};
    [
        alike("HTTP over TCP, 1 connection", P50Us, HttpTcp, SMALL, 1, AtMost(0.5)),
        Comparison {
            what: "Triton's gRPC client for Python, ours over a Unix socket, Triton over TCP",
            figure: P50Us,
            ours: ServerCase { side: Side::Ours, what: CaseWork::Python },
            triton: ServerCase { side: Side::Triton, what: CaseWork::Python },
            aim: Below(1.0),
        },
        alike("HTTP over TCP, 1 connection", ServerCpuUs, HttpTcp, SMALL, 1, AtMost(1.0 / 3.0)),
        alike("HTTP over TCP, 128 connections", ServerCpuUs, HttpTcp, SMALL, 128, AtMost(1.0 / 3.0)),
        alike("HTTP over TCP, 128 connections", PerSecond, HttpTcp, SMALL, 128, AtLeast(2.5)),
        alike("HTTP over TCP, 600 kB, 8 connections", PerSecond, HttpTcp, LARGE, 8, AtLeast(2.0)),
        changed("live update: load, 8 connections", LongestMs, Load, Load, Nothing),
        changed("live update: load, 8 connections", Failed, Load, Load, NoneFails),
        changed("live update: resize, Triton's load, 8 connections", LongestMs, Resize, Load, Nothing),
        changed("live update: resize, Triton's load, 8 connections", Failed, Resize, Load, NoneFails),
        changed("killed worker, 8 connections", LongestMs, Kill, Kill, Nothing),
        changed("killed worker, 8 connections", Failed, Kill, Kill, NoneFails),
        local("HTTP, ours over a Unix socket, 1 connection", P50Us, SMALL, 1),
        local("HTTP, ours over a Unix socket, 1 connection", ServerCpuUs, SMALL, 1),
        local("HTTP, ours over a Unix socket, 128 connections", PerSecond, SMALL, 128),
        local("HTTP, ours over a Unix socket, 600 kB, 8 connections", PerSecond, LARGE, 8),
        alike("HTTP over TCP, 600 kB, 8 connections", ServerCpuUs, HttpTcp, LARGE, 8, Nothing),
        alike("gRPC over TCP, 1 connection", P50Us, GrpcTcp, SMALL, 1, Nothing),
        alike("gRPC over TCP, 128 connections", ServerCpuUs, GrpcTcp, SMALL, 128, Nothing),
        alike("gRPC over TCP, 128 connections", PerSecond, GrpcTcp, SMALL, 128, Nothing),
    ]
};

impl Comparison {
    /// Its figures, of the rounds that were quiet on both sides or else of all rounds, and whether
    /// they meet the aim.
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
            aim: self.aim.words(),
            met: self.aim.met(ours, ratio),
        })
    }
}

fn rounds<'a>(case: &ServerCase, trials: &'a [CaseRounds]) -> &'a [CaseResult] {
    trials.iter().find(|trial| trial.case == *case).map_or(&[], |trial| &trial.rounds)
}

fn spread<'a>(figure: Figure, rounds: impl Iterator<Item = &'a CaseResult>) -> Result<Spread, MeasureError> {
    let values: Vec<f64> = rounds.filter_map(|round| figure.of(round)).collect();
    if values.is_empty() {
        return Err(format!("no round shows {}", figure.name()).into());
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

    /// Whether it is met; nothing where nothing is aimed at, and where there is nothing to divide by.
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
