// The checksum unit on beats from a file, with pauses; prints place and digest of each page.
// Of a line of the file: whether a half page begins, whether it is V, slot, place, 64 bytes.
`timescale 1ns / 1ps
module checksum_tb #(parameter D = 64, parameter BEATS = 1, parameter PAUSES = 0);
    reg clk = 0, rst = 1, beat_valid = 0, out_ready = 0;
    reg [543:0] beats [0:BEATS-1];
    reg [543:0] line = 0;
    wire hold, idle, out_valid;
    wire [11:0] out_place;
    wire [63:0] out_digest;
    integer at = 0, cycle = 0, seed = 1;
    checksum #(.D(D)) unit(.clk(clk), .rst(rst), .beat_valid(beat_valid), .beat(line[511:0]),
        .beat_first(line[540]), .is_value(line[536]), .slot(line[532:528]), .place(line[523:512]), .hold(hold),
        .idle(idle), .out_valid(out_valid), .out_ready(out_ready), .out_place(out_place), .out_digest(out_digest));
    always #5 clk = !clk;
    always @(posedge clk) if (out_valid && out_ready) $display("digest %0d %h", out_place, out_digest);
    initial begin
        $readmemh("beats.hex", beats);
        repeat (4) @(negedge clk);
        rst = 0;
        while (at < BEATS || beat_valid || !idle) begin
            @(negedge clk);
            cycle = cycle + 1;
            out_ready = PAUSES == 0 || $random(seed) % 64 == 0;
            beat_valid = at < BEATS && !hold && (PAUSES == 0 || $random(seed) % 4 != 0);
            line = beat_valid ? beats[at] : {17{$random(seed)}};
            at = at + beat_valid;
            if (cycle > 64 * BEATS + 10000) begin
                $display("it hangs at beat %0d", at);
                $finish;
            end
        end
        $display("cycles %0d", cycle);
        $finish;
    end
endmodule
