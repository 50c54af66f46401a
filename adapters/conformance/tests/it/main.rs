//! The test support against a real server.

use std::net::SocketAddr;
use std::time::Duration;

use inboxd_conformance::servers::{Kind, OwnServer};
use inboxd_conformance::{ensure, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use url::Url;

const DEADLINE: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(300);

fn address(server: &OwnServer) -> SocketAddr {
    let url = Url::parse(server.url()).expect("a URL");
    let host = url.host_str().expect("a host").parse().expect("an address");
    SocketAddr::new(host, url.port().expect("a port"))
}

/// PostgreSQL answers a request for TLS with one byte, whoever asks.
async fn answers(addr: SocketAddr) -> Result<(), String> {
    let ask = async {
        let mut stream = TcpStream::connect(addr).await?;
        stream.write_all(&[0, 0, 0, 8, 4, 210, 22, 47]).await?;
        stream.read_u8().await
    };
    match timeout(SHORT, ask).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("silence".to_owned()),
    }
}

#[tokio::test]
async fn an_own_server_is_killed_frozen_and_started_again_at_its_address() {
    let mut server =
        OwnServer::start_with(Kind::Postgres, "idle_in_transaction_session_timeout = 12345\n")
            .await;
    let addr = address(&server);
    eventually(DEADLINE, async || answers(addr).await).await;
    let setting = server
        .control(&["-Atc", "select setting from pg_settings where name like 'idle_in_tran%'"])
        .await;
    assert_eq!(setting.trim(), "12345");

    server.kill().await;
    eventually(DEADLINE, async || ensure(answers(addr).await.is_err(), "it answers")).await;
    server.restart().await;
    assert_eq!(address(&server), addr);
    eventually(DEADLINE, async || answers(addr).await).await;

    server.pause().await;
    // The kernel still takes connections; nobody answers them.
    assert_eq!(answers(addr).await, Err("silence".to_owned()));
    server.resume().await;
    eventually(DEADLINE, async || answers(addr).await).await;

    let dir = server.dir().to_owned();
    drop(server);
    assert!(!dir.exists());
    assert!(answers(addr).await.is_err());
}
