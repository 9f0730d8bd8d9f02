// Remembers the first error that memory answered with, and the argument whose memory it was.
`default_nettype none
module memory_errors #(parameter PORTS = 3) (
    input  wire                clk,
    input  wire                rst,
    input  wire                start,          // of a call
    input  wire [PORTS-1:0]    answered,
    input  wire [2*PORTS-1:0]  response,       // of AXI: 2 and 3 are errors
    input  wire [32*PORTS-1:0] argument,       // that each port reads or writes
    output reg                 failed,
    output reg  [31:0]         place
);
    integer i;
    always @(posedge clk)
        if (rst || start) failed <= 0;
        else for (i = 0; i < PORTS; i = i + 1)
            if (!failed && answered[i] && response[2*i+1]) begin
                failed <= 1;
                place <= argument[32*i +: 32];
            end
endmodule
`default_nettype wire
